"""Job: one training of our own decoder family on the preset's texts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from attngeo.config import Preset
from attngeo.data import text
from attngeo.language_models import decoder
from attngeo.tracking.mlflow_run import MlflowObserver
from attngeo.tracking.provenance import provenance
from attngeo.training.language import train_on_text
from attngeo.training.seeding import derive_seed

FAMILY = "decoder"


def train_decoder(preset: Preset, name: str, code_digest: str, *, threads: int) -> dict[str, Any]:
    """Train one size with one seed, resumed from its newest checkpoint if it was stopped; what final.json holds.

    Writes decoders/<name>/step<step>/ (a model folder) for every kept step, metrics.jsonl and final.json.
    """
    size, seed = preset.decoder_run(name)
    assert preset.decoders is not None
    shape, recipe = preset.decoders.sizes[size], preset.decoders.training
    parts = text.held_out(text.documents(preset.texts, preset.root), recipe.hold_out)
    tokenizer = decoder.byte_tokenizer()
    training, validation = ([decoder.token_ids(tokenizer, document) for document in part] for part in parts)
    config = decoder.decoder_config(shape.layers, shape.width, shape.heads, recipe.context)
    model = decoder.build(config, derive_seed(seed, "initial weights"))
    shown = {
        "size": size,
        **shape.model_dump(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "non_embedding_parameters": decoder.non_embedding_parameters(model),
        "tokens": "bytes",
    }

    def keep(folder: Path, step: int, numbers: dict[str, Any]) -> None:
        family = FAMILY if step == recipe.steps else f"{FAMILY} at step {step}"
        source = {"name": f"decoder-{name}-step{step}", "family": family, **shown, **numbers}
        decoder.save(folder, model, tokenizer, source | {"code_digest": code_digest, "texts": preset.texts})

    scratch = preset.results / ".scratch" / f"decoder-{name}-{code_digest}"
    info = {
        "digest": code_digest,
        "run_id": f"decoder-{name}",
        "preset": preset.name,
        **shown,
        "recipe_values": asdict(recipe),
        "provenance": provenance(code_digest, root=preset.root),
    }
    observer = MlflowObserver(
        preset.root,
        "Connection walk",
        f"decoder {name}",
        tags={
            "attngeo.kind": "training",
            "attngeo.preset": preset.name,
            "attngeo.size": size,
            "attngeo.seed": str(seed),
            "attngeo.code_digest": code_digest,
            "attngeo.git_revision": info["provenance"]["git_revision"],
        },
        scratch=scratch,
    )
    return train_on_text(
        model,
        training,
        validation,
        recipe,
        seed=seed,
        run_dir=preset.results / "decoders" / name,
        scratch=scratch,
        threads=threads,
        keep=keep,
        logits=decoder.next_token_logits,
        device=preset.resources.train.device,
        observers=(observer,),
        info=info,
    )
