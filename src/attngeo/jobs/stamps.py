"""The digest stamp of every job: which code, values and versions its result depends on."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attngeo.config import Preset, RunRow
from attngeo.files import write_aside
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.paper.targets import PAGES, TARGETS, Target
from attngeo.tracking.code_digest import CodeDigest, write_stamp

_NUMERICS = ("torch", "torchvision", "timm", "numpy")
_MODELS = ("torch", "numpy", "transformers", "tokenizers")
_DRAWING = ("matplotlib", "seaborn", "pandas", "tueplots")


def attention_code(kind: str, root: Path) -> tuple[list[str], list[Path]]:
    """Modules and files that implement an attention kind, a name or path/to/file.py:Class."""
    target = ATTENTION_KINDS.get(kind, kind)
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        return [], [root / place]
    return ([place], []) if place.startswith("attngeo.") else ([], [])


def _run(preset: Preset, digest: CodeDigest, row: RunRow) -> dict[str, Any]:
    modules, files = attention_code(row.attention_kind, preset.root)
    return digest.explain(
        ["attngeo.jobs.train", *modules],
        files=files,
        values={
            "run": row.model_dump(mode="json", exclude={"feeds"}),
            "recipe": asdict(preset.recipes[row.recipe]),
            "loader": preset.datasets[row.dataset].loader,
            "device": preset.resources.train.device,
            "threads": preset.resources.train.threads,
        },
        packages=_NUMERICS,
    )


def _dataset(preset: Preset, digest: CodeDigest, name: str) -> dict[str, Any]:
    values = preset.datasets[name].model_dump(mode="json", exclude={"loader"})
    return digest.explain(["attngeo.jobs.pack"], values=values, packages=("ffcv", "pillow", "torchvision"))


def _walk(preset: Preset, digest: CodeDigest, model_id: str) -> dict[str, Any]:
    values = {
        "model": preset.analysed_models[model_id].model_dump(mode="json"),
        "texts": preset.texts,
        "settings": preset.connection_walk.model_dump(mode="json"),
    }
    return digest.explain(["attngeo.jobs.connection_walk"], values=values, packages=_MODELS)


def _variational(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.variational.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.variational"], values=values, packages=("torch", "numpy", "scipy"))


def _injectivity(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.injectivity.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.injectivity"], values=values, packages=_MODELS)


def _target(preset: Preset, digest: CodeDigest, target: Target) -> dict[str, Any]:
    paper = preset.root / "src/attngeo/paper"
    modules = [target.module, *([] if target in PAGES.values() else ["attngeo.paper.render"])]
    return digest.explain(modules, files=[paper / name for name in target.data_files], packages=_DRAWING)


def stamp_names(preset: Preset) -> Iterator[tuple[str, Callable[[CodeDigest], dict[str, Any]]]]:
    """Every stamp of a preset: its name (a path below results/<preset>/.code/) and what makes its content."""
    for name in preset.datasets:
        yield f"data/{name}", lambda d, name=name: _dataset(preset, d, name)  # type: ignore[misc]
    for row in preset.runs:
        yield f"runs/{row.run_id}", lambda d, row=row: _run(preset, d, row)  # type: ignore[misc]
    for model_id in preset.analysed_models:
        yield f"connection_walk/{model_id}", lambda d, model_id=model_id: _walk(preset, d, model_id)  # type: ignore[misc]
    yield "variational", lambda d: _variational(preset, d)
    yield "injectivity", lambda d: _injectivity(preset, d)
    for name, target in TARGETS.items():
        yield f"paper/{name}", lambda d, target=target: _target(preset, d, target)  # type: ignore[misc]


def stamp_path(preset: Preset, name: str) -> Path:
    """Where the stamp of that name is kept."""
    return preset.results / ".code" / f"{name}.txt"


def code_digests(root: Path) -> CodeDigest:
    """Digests of this project's tree, remembered between parses."""
    return CodeDigest(root, root / "results" / ".code" / "parsed.json")


def write_stamps(preset: Preset) -> None:
    """Bring every stamp of the preset up to date; files whose digest did not change keep their time."""
    digests = code_digests(preset.root)
    for name, content in stamp_names(preset):
        write_stamp(stamp_path(preset, name), content(digests))
    extension = preset.root / "results" / ".code" / "extension.txt"
    write_stamp(extension, digests.explain_extension())
    active = preset.root / "results" / ".code" / "preset.txt"
    if not active.is_file() or active.read_text(encoding="utf-8").strip() != preset.name:
        with write_aside(active) as stream:
            stream.write(preset.name + "\n")
    digests.save_cache()


def current_stamp(preset: Preset, name: str) -> dict[str, Any]:
    """The stamp of a job as its code is now, for jobs that are started by hand."""
    return dict(stamp_names(preset))[name](code_digests(preset.root))
