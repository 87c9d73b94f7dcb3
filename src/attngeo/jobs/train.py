"""Job: one training run of a preset's run sheet."""

from dataclasses import asdict
from typing import Any, Literal

from attngeo.config import Preset
from attngeo.data.augmentation import Augmentation
from attngeo.data.batches import Batches, open_batches
from attngeo.evaluation.macs import count_macs
from attngeo.jobs.run_model import build_model, model_options
from attngeo.tracking.mlflow_run import MlflowObserver
from attngeo.tracking.provenance import provenance
from attngeo.training.distributed import ALONE, Team
from attngeo.training.loop import train
from attngeo.training.seeding import seed_everything


def train_run(preset: Preset, run_id: str, code_digest: str, *, threads: int, team: Team = ALONE) -> dict[str, Any]:
    """Train a run of the sheet, resumed from its newest checkpoint if it was stopped; return what final.json holds."""
    row = preset.run(run_id)
    recipe = preset.recipe_of(row)
    manifest = preset.results / "data" / row.dataset / "manifest.json"
    run_dir = preset.results / "runs" / run_id
    scratch = preset.results / ".scratch" / f"{run_id}-{code_digest}"

    augmentation = Augmentation(recipe.rand_augment, recipe.color_jitter, recipe.random_erasing)

    def batches(split: Literal["train", "val"], size: int, *, augment: bool, images_per_epoch: int | None) -> Batches:
        return open_batches(
            manifest,
            split,
            batch_size=size,
            seed=row.seed,
            image_size=recipe.image_size,
            augment=augment,
            augmentation=augmentation if augment else Augmentation(),
            interpolation=recipe.interpolation,
            workers=preset.datasets[row.dataset].workers,
            loader=preset.datasets[row.dataset].loader,
            images_per_epoch=images_per_epoch,
        )

    training = batches("train", recipe.batch_size, augment=recipe.augment, images_per_epoch=recipe.images_per_epoch)
    validation = batches("val", recipe.eval_batch_size, augment=False, images_per_epoch=None)

    seed_everything(row.seed)
    model = build_model(preset, row, training.num_classes)
    info = {
        "digest": code_digest,
        "run_id": run_id,
        "preset": preset.name,
        "model": row.model,
        "attention": row.attention_kind,
        "attention_of_stages": model.attention_kinds(),
        "model_options": model_options(preset, row, training.num_classes),
        "normalisation": {"mean": training.mean.tolist(), "std": training.std.tolist()},
        "dataset": row.dataset,
        "recipe": row.recipe,
        "options": row.options_text,
        "seed": row.seed,
        **count_macs(model, recipe.image_size),
        "provenance": provenance(code_digest, root=preset.root),
    }
    observer = MlflowObserver(
        preset.root,
        "LaplacianFormer",
        run_id,
        tags={
            "attngeo.kind": "training",
            "attngeo.preset": preset.name,
            "attngeo.attention": row.attention_kind,
            "attngeo.dataset": row.dataset,
            "attngeo.options": row.options_text,
            "attngeo.seed": str(row.seed),
            "attngeo.code_digest": code_digest,
            "attngeo.git_revision": info["provenance"]["git_revision"],
        },
        scratch=scratch,
    )
    return train(
        model,
        training,
        validation,
        recipe,
        seed=row.seed,
        run_dir=run_dir,
        scratch=scratch,
        threads=threads,
        device=team.device if team.size > 1 else preset.resources.train.device,
        observers=(observer,),
        info=info | {"recipe_values": asdict(recipe)},
        team=team,
    )
