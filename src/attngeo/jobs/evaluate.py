"""Job: accuracy, calibration and confusion of a trained model, at any image size, on any set of images."""

import contextlib
import csv
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from attngeo.config import Preset
from attngeo.data import packing
from attngeo.data.batches import Batches, open_batches
from attngeo.data.folders import scan, shown
from attngeo.data.layout import BETON
from attngeo.data.manifest import Manifest, manifest_path, read_manifest
from attngeo.errors import UserError
from attngeo.evaluation.accuracy import Accuracy, measure
from attngeo.files import read_json, sha256_file, write_aside
from attngeo.jobs.stamps import evaluation_digest
from attngeo.models import registry  # noqa: F401  names the models to timm
from attngeo.ops import backend
from attngeo.paper import records
from attngeo.paper.records import Record
from attngeo.tracking.provenance import device_name, provenance
from attngeo.training.arithmetic import Arithmetic, Autocast

FINAL, WEIGHTS = "final.json", "weights.safetensors"
SPLITS = ("val", "train", "all")
_STAND_INS = 3  # images of a class of the split that is not evaluated; one of them may be broken


@dataclass(frozen=True)
class Subject:
    """A trained model: how to make it at an image size, its weights, and what it was trained with."""

    name: str
    model: str  # timm's name
    options: dict[str, Any]
    weights: dict[str, Tensor]
    weights_file: Path
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    attention: str | None  # the kind that runs in every stage of a model of ours
    classes: tuple[str, ...] | None  # names in the order of the outputs, where they are known
    run_id: str | None
    preset: str | None  # that it was trained in
    loader: str  # that reads the images

    def build(self, image_size: int) -> nn.Module:
        """The model for images of that size (px); UserError if the weights are of another model."""
        options = dict(self.options)
        if "img_size" in options:
            options["img_size"] = image_size
        try:
            model: nn.Module = timm.create_model(self.model, **options)
            model.load_state_dict(self.weights)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"{self.weights_file} does not hold weights of {self.model}: {reason}",
                "name the model that it was saved from with --model",
            ) from error
        resize = getattr(model, "set_input_size", None)
        if resize is not None and image_size != self.image_size:
            resize(img_size=image_size)  # timm's: positions are interpolated
        return model


def evaluate(
    preset: Preset,
    target: str,
    data: str | None,
    *,
    model: str | None = None,
    sizes: Sequence[int] = (),
    split: str | None = None,
    batch_size: int = 128,
    bins: int = 15,
    device: str = "cpu",
    autocast: Autocast = "none",
    workers: int = 0,
    out: Path | None = None,
) -> list[tuple[Path, int, Accuracy]]:
    """Measure `target` on `data` at each of `sizes` (px); the record written for each, its size and the result.

    `target` is a run of the preset, the folder of a finished run, or with `model` (a name of timm's) a file of weights.
    `data` is a dataset of the preset, the folder of a packed set, or an image folder; None is the run's own. Each
    result is a record file and a confusion matrix (CSV) beside the weights, or in the folder `out`. UserError for
    a run without weights, classes that differ from the training's, or a split that does not exist.
    """
    if split not in (None, *SPLITS):
        raise UserError(f"there is no split {split!r}", f"use one of {', '.join(SPLITS)}")
    subject = _timm_checkpoint(Path(target), model) if model else finished_run(preset, target)
    arithmetic = Arithmetic(device, autocast)
    results = []
    with _images(preset, data, subject, split, workers) as (manifest, name, chosen):
        _check_classes(subject, manifest, name)
        for size in sizes or (subject.image_size,):
            backend.forget()
            built = arithmetic.place_model(subject.build(size))
            opened = [
                _open(manifest, part, size, batch_size, subject.loader, workers)
                for part in (("train", "val") if chosen == "all" else (chosen,))
            ]

            def predict(images: Tensor, built: nn.Module = built) -> Tensor:
                placed, _ = arithmetic.place(_renormalised(images, manifest, subject), torch.empty(0))
                return arithmetic.forward(built, placed)

            result = measure(
                built,
                (batch for batches in opened for batch in batches),
                manifest.num_classes,
                predict=predict,
                bins=bins,
            )
            path = _path(subject, out, f"{name}-{chosen}-{size}")
            labels = {"model": subject.model, "data": name, "split": chosen, "image_size": size}
            settings = {
                "weights": subject.weights_file.name,
                "weights_sha256": sha256_file(subject.weights_file),
                "trained_image_size": subject.image_size,
                "mean": list(subject.mean),
                "std": list(subject.std),
                "bins": bins,
                "classes_checked": subject.classes is not None,
                "split_rule": manifest.raw["split_rule"],
                "batch_size": batch_size,
                "device": device,
                **arithmetic.describe(),
                "images": [batches.describe() for batches in opened],
                "ran": backend.ran(),
            }
            _write(path, result, labels, settings, manifest.raw["classes"], subject, preset)
            results.append((path, size, result))
    return results


def finished_run(preset: Preset, target: str) -> Subject:
    """A run by its id or folder, or by its weights or final.json."""
    folder = Path(target).absolute()
    if folder.name in (FINAL, WEIGHTS):
        folder = folder.parent
    if not (folder / FINAL).is_file():
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{target} alone does not say which model it is", "name it: --model MODEL (a name of timm)")
        folder = preset.results / "runs" / preset.run(target).run_id
    if not (folder / FINAL).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder} holds no finished run", f"train it first: attngeo train {folder.name} --preset {preset.name}"
        )
    final = read_json(folder / FINAL)
    packed = manifest_path(folder.parents[1] / "data" / str(final["dataset"]))
    training = read_manifest(packed).raw if packed.is_file() else None
    if "model_options" not in final or "normalisation" not in final:
        raise UserError(
            f"{folder / FINAL} is of an older version",
            f"train it again: attngeo train {folder.name} --preset {preset.name}",
        )
    return Subject(
        name=str(final["run_id"]),
        model=str(final["model"]),
        options={**final["model_options"], "drop_path_rate": 0.0},
        weights=safetensors.torch.load_file(folder / WEIGHTS),
        weights_file=folder / WEIGHTS,
        mean=tuple(final["normalisation"]["mean"]),
        std=tuple(final["normalisation"]["std"]),
        image_size=int(final["recipe_values"]["image_size"]),
        attention=str(final["attention"]),
        classes=tuple(training["classes"]) if training else None,
        run_id=str(final["run_id"]),
        preset=str(final["preset"]),
        loader="auto",
    )


def _timm_checkpoint(path: Path, model: str) -> Subject:
    """A file of weights saved by timm's training script, by torch.save(state_dict) or as safetensors."""
    if not timm.is_model(model):
        raise UserError(
            f"timm knows no model {model!r}", f"for example: {', '.join(timm.list_models(f'*{model}*')[:5])}"
        )
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give the path of a checkpoint, .pth or .safetensors")
    try:
        weights = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # of any kind: the file may be anything
        raise UserError(f"{path} is no checkpoint ({type(error).__name__}: {error})", "give another file") from error
    config = timm.get_pretrained_cfg(model) or timm.models.PretrainedCfg()
    head = weights.get(f"{config.classifier}.weight")
    return Subject(
        name=path.stem,
        model=model,
        options={} if head is None else {"num_classes": len(head)},
        weights=weights,
        weights_file=path,
        mean=tuple(config.mean),
        std=tuple(config.std),
        image_size=int(config.input_size[1]),
        attention=None,
        classes=None,
        run_id=None,
        preset=None,
        loader="torch",  # published weights expect Pillow's pixels
    )


@contextlib.contextmanager
def _images(
    preset: Preset, data: str | None, subject: Subject, split: str | None, workers: int
) -> Iterator[tuple[Manifest, str, str]]:
    """The packed set, its name, and the split to take: the one asked for, or "val".

    An image folder is listed for the duration of the block, and the images of that split are checked; without train/
    and val/ all its images are meant, since nothing says that some were trained on.
    """
    if data is None:
        if subject.run_id is None:
            raise UserError("there are no images to evaluate on", "name a dataset or a folder with --data")
        yield (
            read_manifest(subject.weights_file.parents[2] / "data" / _dataset_of(subject)),
            _dataset_of(subject),
            split or "val",
        )
        return
    if data in preset.datasets:
        folder = preset.results / "data" / data
        if not manifest_path(folder).is_file():
            raise UserError(f"dataset {data} is not packed yet", f"pack it: attngeo pack {data} --preset {preset.name}")
        yield read_manifest(folder), data, split or "val"
        return
    folder = Path(data).expanduser()
    if manifest_path(folder).is_file():
        yield read_manifest(folder), shown(folder.absolute().name.removesuffix(BETON)), split or "val"
        return
    if not folder.is_dir():
        raise UserError(
            f"{data} is neither a folder nor a dataset of preset {preset.name}",
            f"datasets: {', '.join(preset.datasets)}",
        )
    with tempfile.TemporaryDirectory() as scratch:
        has_splits = (folder / "val").is_dir()
        chosen = split or ("val" if has_splits else "all")
        looked_at = _view(folder, chosen, Path(scratch) / "view") if has_splits and chosen != "all" else folder
        name = shown(folder.absolute().name)
        listed = packing.pack(looked_at, Path(scratch) / "listed", storage="folder", workers=max(1, workers), name=name)
        yield read_manifest(listed), name, chosen


def _view(folder: Path, split: str, view: Path) -> Path:
    """A folder of links to all of one split and to a few images of each class of the other: to check all takes hours.

    The other must stay, since the classes are those of train/; what is odd about either is an error all the same.
    """
    for name, files in scan(folder).splits.items():
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        if name == split:
            (view / name).symlink_to((folder / name).absolute())
            continue
        seen: Counter[int] = Counter()
        for file in files:
            seen[file.label] += 1
            if seen[file.label] <= _STAND_INS:
                link = view / file.path
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((folder / file.path).absolute())
    return view


def _dataset_of(subject: Subject) -> str:
    return str(read_json(subject.weights_file.parent / FINAL)["dataset"])


def _check_classes(subject: Subject, manifest: Manifest, name: str) -> None:
    """UserError unless the images have the classes, in the order, that the model was trained on."""
    theirs = manifest.raw["classes"]
    if subject.classes is not None and list(subject.classes) != list(theirs):
        differing = sorted(set(subject.classes) ^ set(theirs))[:5]
        raise UserError(
            f"{name} has not the classes that {subject.name} was trained on (differing: {', '.join(differing)})",
            "evaluate on images of the same classes, in folders of the same names",
        )


def _open(manifest: Manifest, split: Any, size: int, batch_size: int, loader: Any, workers: int) -> Batches:
    """Every image of a split once, in order, as validation sees it."""
    batches = open_batches(
        manifest.path,
        split,
        batch_size=min(batch_size, manifest.num_images(split)),
        seed=0,
        image_size=size,
        augment=False,
        loader=loader,
        workers=workers,
    )
    batches.order = replace(batches.order, shuffled=False)
    return batches


def _renormalised(images: Tensor, manifest: Manifest, subject: Subject) -> Tensor:
    """From the set's own mean and deviation to those that the model was trained with: [B, 3, H, W]."""
    if list(subject.mean) == manifest.raw["mean"] and list(subject.std) == manifest.raw["std"]:
        return images
    theirs, ours = (
        [torch.tensor(values, dtype=images.dtype).view(1, -1, 1, 1) for values in pair]
        for pair in ((manifest.raw["mean"], manifest.raw["std"]), (subject.mean, subject.std))
    )
    return (images * theirs[1] + (theirs[0] - ours[0])) / ours[1]


def _path(subject: Subject, out: Path | None, stem: str) -> Path:
    """Where a result goes: a folder that others share needs the subject's name in the file's."""
    if out is None and subject.run_id:
        return subject.weights_file.parent / "evaluations" / f"{stem}.json"
    return (out or subject.weights_file.parent) / f"{subject.name}-{stem}.json"


def _write(
    path: Path,
    result: Accuracy,
    labels: dict[str, Any],
    settings: dict[str, Any],
    classes: Sequence[str],
    subject: Subject,
    preset: Preset,
) -> None:
    """The record file, and the confusion matrix beside it: a row a true class, a column a predicted one."""
    share = result.top1 / 100
    numbers: dict[str, tuple[float | None, str, float | None]] = {
        "top1": (result.top1, "%", 100 * (share * (1 - share) / result.n) ** 0.5),
        "top5": (result.top5, "%", None),
        "nll": (result.nll, "nats", None),
        "brier": (result.brier, "", None),
        "ece": (result.ece, "", None),
        "solver_residual_max": (result.residual, "", None),
    }
    common: dict[str, Any] = {"run_ids": [subject.run_id] if subject.run_id else []}
    lines = [
        Record(
            metric=metric,
            value=value,
            unit=unit,
            n=result.n,
            spread=spread,
            spread_kind="" if spread is None else "standard error over images",
            labels=labels,
            **common,
        )
        for metric, (value, unit, spread) in numbers.items()
        if value is not None
    ]
    lines += [
        Record(
            metric="accuracy of a confidence bin",
            value=part.accuracy,
            n=part.n,
            labels={**labels, "above": part.low, "up_to": part.high, "mean_confidence": part.confidence},
            **common,
        )
        for part in result.bins
        if part.n
    ]
    code_digest = evaluation_digest(preset, subject.attention)
    origin = provenance(code_digest, device=device_name(settings["device"]), root=preset.root)
    origin |= {"preset": subject.preset or preset.name, "settings": settings}
    file = records.RecordFile(source=f"evaluation of {subject.name}", records=lines)
    records.write(path, file, provenance=origin)
    with write_aside(path.with_suffix(".confusion.csv")) as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["true class", *classes])
        for class_name, row in zip(classes, result.confusion.tolist(), strict=True):
            table.writerow([class_name, *row])
