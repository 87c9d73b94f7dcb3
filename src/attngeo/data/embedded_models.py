"""Turns pretrained weights found in packages (GGUF, ONNX, safetensors) into Hugging Face folders that load in a
second.

The files are read as data by their formats' parsers; no code that came with them runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attngeo.files import write_json

GGUF_LLAMA_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GGUF_CONTROL_TOKEN = 3
DINOV2_ATTENTION_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def undo_rotary_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix [heads * D, C], from GGUF's interleaved pairs to llama's half-split order."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_llama(path: Path, folder: Path) -> None:
    """Dequantise a GGUF file of architecture llama to float32; write it with its byte-level BPE tokenizer."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values["general.architecture"] != "llama":
        raise ValueError(f"{path.name} has architecture {values['general.architecture']!r}, expected 'llama'")
    heads = values["llama.attention.head_count"]
    key_value_heads = values["llama.attention.head_count_kv"]

    arrays: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            if kind in ("attn_q", "attn_k"):
                weight = undo_rotary_permutation(weight, heads if kind == "attn_q" else key_value_heads)
            arrays[f"model.layers.{layer}.{GGUF_LLAMA_NAMES[kind]}.weight"] = weight
        else:
            renamed = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[stem]
            arrays[f"{renamed}.weight"] = weight

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in arrays,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )
    _save_model(LlamaForCausalLM, config, arrays, folder)
    _gguf_tokenizer(values).save_pretrained(folder)


def _gguf_tokenizer(values: Mapping[str, Any]) -> Any:
    """The byte-level BPE tokenizer stored in a GGUF header; digits are split one by one, as its "smollm" rule says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"unknown tokenizer {values['tokenizer.ggml.model']}/{values['tokenizer.ggml.pre']}")
    tokens = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    merges = [tuple(line.split(" ")) for line in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = values["tokenizer.chat_template"]
    return fast


def bert_folder(source: Path, folder: Path) -> None:
    """Copy a Hugging Face BERT folder; its tokenizer loses the truncation to 128 tokens meant for sentence vectors."""
    for name in ("config.json", "model.safetensors", "LICENSE", "NOTICE"):
        (folder / name).write_bytes((source / name).read_bytes())
    copy_bert_tokenizer(source, folder)


def copy_bert_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of a BERT folder, without padding and truncation, which would silently shorten texts."""
    import json

    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (folder / name).write_bytes((source / name).read_bytes())
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["truncation"] = tokenizer["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def onnx_bert(path: Path, folder: Path) -> None:
    """Rebuild a BERT encoder without pooler from an ONNX export and write it, without tokenizer, to `folder`."""
    from transformers import BertConfig, BertModel

    arrays = _onnx_arrays(path, node_prefix="/model/model.0/auto_model/", name_prefix="model.0.auto_model.")
    vocabulary, width = arrays["embeddings.word_embeddings.weight"].shape
    config = BertConfig(
        architectures=["BertModel"],
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=len({name.split(".")[2] for name in arrays if name.startswith("encoder.layer.")}),
        num_attention_heads=12,
        intermediate_size=arrays["encoder.layer.0.intermediate.dense.bias"].shape[0],
        max_position_embeddings=arrays["embeddings.position_embeddings.weight"].shape[0],
        type_vocab_size=arrays["embeddings.token_type_embeddings.weight"].shape[0],
        dtype="float32",
    )
    _save_model(lambda config: BertModel(config, add_pooling_layer=False), config, arrays, folder)


def onnx_dinov2(path: Path, folder: Path) -> None:
    """Rebuild the DINOv2 backbone of an ONNX saliency network; the unused mask token, not in it, becomes zeros."""
    from transformers import Dinov2Config, Dinov2Model

    raw = _onnx_arrays(path, node_prefix="/backbone/", name_prefix="backbone.")
    arrays: dict[str, np.ndarray] = {}
    for name, array in raw.items():
        for old, new in DINOV2_ATTENTION_NAMES.items():
            name = name.replace(old, new)
        arrays[name] = array
    # The export split the position table into the class token's row and the patches' rows.
    class_row, patch_rows = (arrays.pop(name) for name in ("onnx::Concat_1957", "onnx::Reshape_1962"))
    positions = np.concatenate([class_row, patch_rows.reshape(1, -1, class_row.shape[-1])], axis=1)
    arrays["embeddings.position_embeddings"] = positions
    width = class_row.shape[-1]
    arrays["embeddings.mask_token"] = np.zeros((1, width), dtype=np.float32)
    patch = arrays["embeddings.patch_embeddings.projection.weight"].shape[-1]
    config = Dinov2Config(
        architectures=["Dinov2Model"],
        hidden_size=width,
        num_hidden_layers=len({name.split(".")[2] for name in arrays if name.startswith("encoder.layer.")}),
        num_attention_heads=6,
        patch_size=patch,
        image_size=patch * round((positions.shape[1] - 1) ** 0.5),
        dtype="float32",
    )
    _save_model(Dinov2Model, config, arrays, folder)
    preprocessing = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": 256},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }
    write_json(folder / "preprocessor_config.json", preprocessing)


def _onnx_arrays(path: Path, *, node_prefix: str, name_prefix: str) -> dict[str, np.ndarray]:
    """Initialisers of an ONNX graph under PyTorch's names.

    Exports keep the names of biases and norms but transpose linear weights and lose their names; each is found again
    as the second operand of the MatMul node that is named after its module.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored = {item.name: item for item in graph.initializer}
    arrays: dict[str, np.ndarray] = {}
    for name, item in stored.items():
        if name.startswith(name_prefix):
            arrays[name.removeprefix(name_prefix)] = numpy_helper.to_array(item)
        elif name.startswith(("onnx::Concat_", "onnx::Reshape_")) and len(item.dims) == 3:
            arrays[name] = numpy_helper.to_array(item)
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith(node_prefix) and node.input[1] in stored:
            module = node.name.removeprefix(node_prefix).removesuffix("/MatMul").replace("/", ".")
            arrays[f"{module}.weight"] = np.ascontiguousarray(numpy_helper.to_array(stored[node.input[1]]).T)
    return arrays


def _save_model(build: Any, config: Any, arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Check `arrays` against the parameters of `build(config)` (on the meta device); write weights and config."""
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build(config).state_dict().items()}
    if getattr(config, "tie_word_embeddings", False):
        expected.pop("lm_head.weight", None)
    found = {name: array.shape for name, array in arrays.items()}
    if found != expected:
        different = sorted({name for name, _ in found.items() ^ expected.items()})
        raise ValueError(f"the weights do not fit {config.model_type}: {', '.join(different[:5])}")
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(folder)
