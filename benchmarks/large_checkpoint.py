"""Peak memory of `--weights-only` on a checkpoint of an 8-billion-parameter shape: two depths, and 32 layers from them.

Writes a Llama of hidden size 4096, 32 heads, 8 value groups, head dimension 128 and bfloat16 weights, one shard a
layer, with few layers; measures it in a process of its own; deletes it. The goal: two stored layers and 1 GB.

    python -m benchmarks.large_checkpoint [--layers 4 8] [--folder DIR] [--windows 1]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HIDDEN, HEADS, GROUPS, HEAD_DIM, INNER, VOCABULARY = 4096, 32, 8, 128, 14336, 128256
DEPTH = 32  # layers of the model that this is the shape of
GOAL_BEYOND = 1e9  # bytes beyond two layers

_MEASURE = """
import json, sys, time
from pathlib import Path
import torch, transformers
torch.set_num_threads(1)
from attngeo.connection_walk import analyze
from attngeo.connection_walk.weights_only import analyze_weights
from attngeo.evaluation.timing import return_pages, status_kib
from attngeo.language_models.loading import load
return_pages()
imported = status_kib("VmRSS")
begun = time.monotonic()
if sys.argv[2] == "0":
    frame = analyze_weights(sys.argv[1])
else:
    windows = torch.arange(int(sys.argv[2]) * 128).reshape(-1, 128)
    frame = analyze(load(sys.argv[1], None, on_demand=True), windows, windows=len(windows))
print(json.dumps({
    "imported_bytes": imported * 1024, "peak_bytes": status_kib("VmHWM") * 1024, "s": time.monotonic() - begun,
    "rows": len(frame), "isometry_score": float(frame.query(
        "metric == 'isometry_score' and control == 'trained' and head < 0")["value"].mean()),
}))
"""


def write(folder: Path, layers: int, seed: int = 0) -> int:
    """Write such a checkpoint, a shard at a time; bytes of one layer."""
    import torch
    import transformers
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=draw)).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(folder)
    placed: dict[str, str] = {}
    bytes_of_layer = 0
    for shard in range(layers + 1):
        file = f"model-{shard + 1:05d}-of-{layers + 1:05d}.safetensors"
        if shard == layers:
            tensors = {"model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN), "model.norm.weight": ones()}
        else:
            layer = f"model.layers.{shard}"
            tensors = {
                f"{layer}.self_attn.q_proj.weight": drawn(HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": drawn(GROUPS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": drawn(GROUPS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD_DIM),
                f"{layer}.mlp.gate_proj.weight": drawn(INNER, HIDDEN),
                f"{layer}.mlp.up_proj.weight": drawn(INNER, HIDDEN),
                f"{layer}.mlp.down_proj.weight": drawn(HIDDEN, INNER),
                f"{layer}.input_layernorm.weight": ones(),
                f"{layer}.post_attention_layernorm.weight": ones(),
            }
            bytes_of_layer = sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return bytes_of_layer


def measure(depths: Sequence[int], parent: Path | None = None, windows: int = 0) -> list[dict[str, float]]:
    """Peak memory and seconds of the weights' analysis, or with `windows` of all, at each depth; no file stays."""
    folder = Path(tempfile.mkdtemp(prefix="large-checkpoint-", dir=parent))
    try:
        bytes_of_layer = write(folder, max(depths))
        return [_measure(folder, layers, windows) | {"bytes_of_layer": bytes_of_layer} for layers in depths]
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path, layers: int, windows: int) -> dict[str, float]:
    """The first layers of the checkpoint alone, in a process of its own."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    command = [sys.executable, "-c", _MEASURE, str(folder), str(windows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement failed: {done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told | {"layers": layers}


def extrapolated(shallow: dict[str, float], deep: dict[str, float], key: str) -> float:
    """The line through two depths, at `DEPTH` layers."""
    slope = (deep[key] - shallow[key]) / (deep["layers"] - shallow["layers"])
    return deep[key] + slope * (DEPTH - deep["layers"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs=2, default=(4, 8), help="two depths to measure at")
    parser.add_argument("--folder", type=Path, help="where the checkpoint lies meanwhile (about 1.1 GB + 0.44 a layer)")
    parser.add_argument("--windows", type=int, default=0, help="run so many windows of 128 tokens, too")
    options = parser.parse_args()
    found = measure(options.layers, options.folder, options.windows)
    goal = 2 * found[0]["bytes_of_layer"] + GOAL_BEYOND
    for told in found:
        print(
            f"{told['layers']:.0f} layers: peak {told['peak_bytes'] / 1e9:.2f} GB, of it libraries "
            f"{told['imported_bytes'] / 1e9:.2f} GB; {told['s']:.1f} s; a layer is stored in "
            f"{told['bytes_of_layer'] / 1e9:.2f} GB"
        )
    if options.windows:
        return  # an untrained network below the share of memory is drawn whole: no line leads from here to more layers
    peak, seconds = (extrapolated(found[0], found[1], key) for key in ("peak_bytes", "s"))
    print(
        f"{DEPTH} layers, by the line through these: peak {peak / 1e9:.2f} GB "
        f"(goal {goal / 1e9:.2f} GB), {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
