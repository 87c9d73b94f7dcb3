"""What the files of a project say about a run: its claims, its seeds, the data it read and the model it made."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from attngeo.files import read_json, sha256_file

SAME_BUT_FOR_SEED = ("preset", "model", "size", "attention", "dataset", "recipe", "options")
_DIGEST = 36  # characters, MLflow's limit
_DECODER = "decoder-"  # how the run ids of our own decoders begin


def run_folder(root: Path, params: Mapping[str, Any]) -> Path:
    """Where the files of a training with these parameters are."""
    run_id = str(params.get("run_id", ""))
    kind, name = ("decoders", run_id.removeprefix(_DECODER)) if _is_decoder(params) else ("runs", run_id)
    return root / "results" / str(params.get("preset", "")) / kind / name


def digest_of_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of the files that exist among `paths`."""
    found = [f"{path.name} {sha256_file(path)}" for path in paths if path.is_file()]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def training_files(folder: Path) -> list[Path]:
    """Files of a training that its record in MLflow repeats."""
    return [folder / "metrics.jsonl", folder / "final.json"]


def claims_of_targets(names: Iterable[str]) -> set[str]:
    """Ids of the claims that these figures and tables show."""
    from attngeo.paper.targets import TARGETS

    return {claim for name in names if name in TARGETS for claim in TARGETS[name].claim_ids}


def claims_of_file(path: str) -> set[str]:
    """Ids of the claims that count a file relative to results/<preset> among their evidence."""
    from attngeo.paper.claims import claims

    return {claim.id for claim in claims() if any(fnmatch(path, pattern) for pattern in claim.evidence)}


def claims_of_training(root: Path, params: Mapping[str, Any]) -> set[str]:
    """Ids of the claims shown by what the run feeds, by the preset's run sheet of now; none for a run not in it."""
    from attngeo.config import load_current
    from attngeo.errors import UserError

    if _is_decoder(params):
        return claims_of_file(f"analyses/connection_walk/{params['run_id']}.json")
    try:
        preset = load_current(root, str(params["preset"]))
        return claims_of_targets(preset.run(str(params["run_id"])).feeds)
    except (UserError, KeyError, ValueError):
        return set()


def claims_tag(ids: Iterable[str]) -> dict[str, str]:
    """The tag that names claims; none without claims. Spaces around each id make `LIKE '% P2.f %'` exact."""
    ids = sorted(ids)
    return {"attngeo.claims": f" {' '.join(ids)} "} if ids else {}


def seeds_of(params: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Name and tags of the run above all seeds of a training; None for one that does not say what it is of."""
    same = {key: str(params[key]) for key in SAME_BUT_FOR_SEED if params.get(key) not in (None, "")}
    if "preset" not in same or "seed" not in params:
        return None
    named = [value for key, value in same.items() if key not in ("preset", "attention")]
    if _is_decoder(params):
        named.insert(0, "decoder")
    group = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
    tags = {"attngeo.kind": "seeds", "attngeo.group": group}
    return ", ".join(named), tags | {f"attngeo.{key}": value for key, value in same.items()}


def datasets_of(root: Path, params: Mapping[str, Any]) -> list[Any]:
    """MLflow's dataset inputs of a training, from the manifest of its packed set or from its texts."""
    if _is_decoder(params):
        return _texts(root, str(params["preset"]))
    path = root / "results" / str(params.get("preset")) / "data" / str(params.get("dataset")) / "manifest.json"
    if not path.is_file():
        return []
    manifest = read_json(path)
    kept = ("storage", "licence", "num_classes", "split_rule", "hold_out", "mean", "std")
    profile = {key: manifest[key] for key in kept if key in manifest}
    return [
        _dataset(
            str(params["dataset"]),
            hashlib.sha256(f"{split} {manifest[split]['sha256']}".encode()).hexdigest(),
            source={"uri": path.relative_to(root).as_posix(), "sha256": manifest[split]["sha256"]},
            profile=profile | {"images": manifest[split]["n"], "split": split},
            context={"train": "training", "val": "validation"}[split],
        )
        for split in ("train", "val")
    ]


def model_files(root: Path, params: Mapping[str, Any]) -> list[Path]:
    """The weights of a finished training and what builds its model again; empty without weights."""
    folder = run_folder(root, params)
    if not (folder / "final.json").is_file():
        return []
    if _is_decoder(params):
        files = sorted((folder / f"step{read_json(folder / 'final.json')['steps']}").glob("*"))
    else:
        files = [folder / "weights.safetensors", folder / "final.json"]
    weights = [path for path in files if path.suffix == ".safetensors" and path.is_file()]
    return files if weights else []


@contextmanager
def model_folder(files: Iterable[Path], run_id: str, params: Mapping[str, Any], model_id: str) -> Iterator[Path]:
    """A folder that is an MLflow model of these files: the weights (safetensors) with a signature.

    They are linked to: MLflow copies what links lead to.
    """
    with tempfile.TemporaryDirectory(prefix="attngeo-model-") as made:
        for file in files:
            (Path(made) / file.name).symlink_to(file.resolve(strict=True))
        [weights] = [path.name for path in Path(made).glob("*.safetensors")]
        _write_mlmodel(Path(made), run_id, params, model_id, weights)
        yield Path(made)


def _is_decoder(params: Mapping[str, Any]) -> bool:
    return str(params.get("run_id", "")).startswith(_DECODER) and "size" in params


def _dataset(name: str, sha256: str, *, source: Mapping[str, Any], profile: Mapping[str, Any], context: str) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=name,
        digest=sha256[:_DIGEST],
        source_type="local",
        source=json.dumps(source),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _texts(root: Path, preset: str) -> list[Any]:
    from attngeo.config import load_current
    from attngeo.data.text import documents

    texts = load_current(root, preset).texts
    read = documents(texts, root)
    sha256 = hashlib.sha256("\0".join(read).encode()).hexdigest()
    profile = {"documents": len(read), "characters": sum(map(len, read))}
    return [_dataset("texts", sha256, source={"uri": texts, "sha256": sha256}, profile=profile, context="training")]


def _write_mlmodel(folder: Path, run_id: str, params: Mapping[str, Any], model_id: str, weights: str) -> None:
    """MLmodel beside the weights. Its only flavour is ours: MLflow's own for torch would be a pickle."""
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    if _is_decoder(params):
        taken = TensorSpec(np.dtype(np.int64), (-1, -1), "token_ids")
        given = TensorSpec(np.dtype(np.float32), (-1, -1, -1), "logits")
    else:
        options = params.get("model_options", {})
        size = int(params.get("image_size", options.get("img_size", -1)))
        taken = TensorSpec(np.dtype(np.float32), (-1, 3, size, size), "images")
        given = TensorSpec(np.dtype(np.float32), (-1, int(options.get("num_classes", -1))), "logits")
    described = {"weights": weights, "model": str(params.get("model", "decoder")), "attention": params.get("attention")}
    model = Model(run_id=run_id, model_id=model_id, signature=ModelSignature(Schema([taken]), Schema([given])))
    model.add_flavor("attngeo", **described)
    model.save(str(folder / "MLmodel"))
