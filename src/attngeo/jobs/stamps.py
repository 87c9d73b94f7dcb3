"""The digest stamp of every job: which code, values and versions its result depends on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attngeo.config import DecoderCheckpoint, Preset, RunRow
from attngeo.data import embedded
from attngeo.evaluation.token_sizes import FUSED_SOFTMAX
from attngeo.files import write_aside
from attngeo.jobs import gpu_timings, licences, sources
from attngeo.layers.registry import ATTENTION_KINDS, FEED_FORWARDS
from attngeo.models.names import feed_forward_of, kinds_in
from attngeo.paper.targets import PAGES, TARGETS, Target, made_from
from attngeo.tracking.code_digest import CodeDigest, write_stamp

_NUMERICS = ("torch", "torchvision", "timm", "numpy")
_IMAGES = ("pillow", "ffcv", "opencv-python")
_PRETRAINED = ("torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors", "pillow")
_TRAJECTORIES = "attngeo.jobs.trajectories"
FIBER_IMAGES = "fashion-mnist"  # the task's images, where it is one of the preset's
_DECODERS = ("torch", "timm", "numpy", "transformers", "tokenizers", "safetensors")
_FIBER = ("torch", "timm", "numpy", "scipy", "pandas")
_DRAWING = ("matplotlib", "seaborn", "pandas", "tueplots", "scipy", "jinja2")


def _attention(attention: str, digest: CodeDigest) -> tuple[list[str], list[Path]]:
    """Modules and files that implement an attention: names or path/to/file.py:Class, of all stages or one a stage."""
    modules: list[str] = []
    files: list[Path] = []
    for kind in dict.fromkeys(kinds_in(attention)):
        place = ATTENTION_KINDS.get(kind, kind).rpartition(":")[0]
        if place.endswith(".py"):
            own_files, own_modules = digest.closure_of_file(digest.root / place)
            modules, files = modules + own_modules, files + own_files
        else:
            modules.append(place)
    return modules, files


def _layers(row: RunRow, digest: CodeDigest) -> tuple[list[str], list[Path]]:
    """Modules and files that implement a run's attention and feed-forward."""
    modules, files = _attention(row.attention_kind, digest)
    feed_forward = FEED_FORWARDS.get(feed_forward_of(row.model, row.pyramid_options))
    return [*modules, *([feed_forward.rpartition(":")[0]] if feed_forward else [])], files


def folder_state(folder: Path) -> dict[str, Any]:
    """What tells, without reading a file, that a user's folder is another one now.

    Files directly inside count with size and time; of the folders inside, and of the classes below train/ and val/,
    the time counts, which changes when a file is added, removed or renamed. A file overwritten in place deeper down
    goes unnoticed, since an image set may hold millions: run snakemake with `--forcerun pack` then.
    """
    state: dict[str, Any] = {"folder": str(folder)}
    if not folder.is_dir():
        return state | {"exists": False}
    for entry in sorted(folder.iterdir()):
        status = entry.stat()
        if entry.is_dir():
            state[f"{entry.name}/"] = status.st_mtime_ns
            if entry.name in ("train", "val"):
                classes = [item for item in sorted(entry.iterdir()) if item.is_dir()]
                state |= {f"{entry.name}/{item.name}/": item.stat().st_mtime_ns for item in classes}
        else:
            state[entry.name] = [status.st_size, status.st_mtime_ns]
    return state


def _source(preset: Preset, name: str, source: str) -> Any:
    """The state of a dataset or a model where it comes from."""
    if source == "embedded":
        return embedded.pins(name)
    if source == "hub" or source.startswith("hub:"):
        return source
    return folder_state(preset.root / Path(source).expanduser())


def _run(preset: Preset, digest: CodeDigest, row: RunRow) -> dict[str, Any]:
    modules, files = _layers(row, digest)
    return digest.explain(
        ["attngeo.jobs.train", *modules],
        files=files,
        values={
            "run": row.model_dump(mode="json", exclude={"feeds"}),
            "recipe": asdict(preset.recipe_of(row)),
            "loader": preset.datasets[row.dataset].loader,
            "device": preset.resources.train.device,
            "threads": preset.resources.train.threads,
            "processes": preset.resources.train.processes,
        },
        packages=(*_NUMERICS, *_IMAGES),
    )


def _dataset(preset: Preset, digest: CodeDigest, name: str) -> dict[str, Any]:
    config = preset.datasets[name]
    values = config.model_dump(mode="json", exclude={"loader", "workers"}) | {
        "state": _source(preset, name, config.source)
    }
    if config.val_labels:
        labels = preset.root / Path(config.val_labels).expanduser()
        status = labels.stat() if labels.is_file() else None
        values["val_labels_state"] = [status.st_size, status.st_mtime_ns] if status else "missing"
    return digest.explain(["attngeo.jobs.pack"], values=values, packages=("torchvision", *_IMAGES))


def _walk(preset: Preset, digest: CodeDigest, model_id: str) -> dict[str, Any]:
    model = preset.analysed_models[model_id]
    settings = preset.walk_settings(model).model_dump(mode="json")
    files, values = _looked_at(preset, digest, model_id)
    unused = ("windows", "window_tokens") if model in preset.vision_models else ("images",)
    values["settings"] = {key: value for key, value in settings.items() if key not in unused}
    return digest.explain(["attngeo.jobs.connection_walk"], values=values, files=files, packages=_PRETRAINED)


def _looked_at(preset: Preset, digest: CodeDigest, model_id: str) -> tuple[list[Path], dict[str, Any]]:
    """What tells that a pretrained model, or the text or the images that it is shown, are others now."""
    model = preset.analysed_models[model_id]
    # Our own decoders are results of this workflow: what they are trained by stands for them, not times of files.
    if isinstance(model, DecoderCheckpoint):
        state = _decoder(preset, digest, model.run)["digest"]
    else:
        state = _source(preset, model_id, model.source)
    values: dict[str, Any] = {"model": model_id, "state": state}
    if model in preset.vision_models:
        return [], values | {"images": embedded.pins(sources.PHOTOGRAPHS)}
    files, texts = _texts(preset)
    return files, values | texts


def _texts(preset: Preset) -> tuple[list[Path], dict[str, Any]]:
    """The files of the embedded texts, or the state of a user's folder of texts."""
    if preset.texts == "embedded":
        return sorted((preset.root / "src/attngeo/data/text").glob("*.txt")), {}
    return [], {"texts": folder_state(preset.root / Path(preset.texts).expanduser())}


def _decoder(preset: Preset, digest: CodeDigest, name: str) -> dict[str, Any]:
    run = preset.decoder_run(name)
    assert preset.decoders is not None
    files, texts = _texts(preset)
    values = {
        "size": preset.decoders.sizes[run.size].model_dump(mode="json"),
        "seed": run.seed,
        "training": asdict(preset.decoders.training),
        "device": preset.resources.train.device,
        "threads": preset.resources.train.threads,
    }
    return digest.explain(["attngeo.jobs.decoders"], values=values | texts, files=files, packages=_DECODERS)


def _variational(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.variational.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.variational"], values=values, packages=("torch", "numpy", "scipy"))


def _trajectories(preset: Preset, digest: CodeDigest, model_id: str) -> dict[str, Any]:
    files, values = _looked_at(preset, digest, model_id)
    values["settings"] = preset.trajectory_settings(preset.analysed_models[model_id]).model_dump(mode="json")
    return digest.explain([_TRAJECTORIES], values=values, files=files, packages=_PRETRAINED)


def _trajectories_of_runs(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.trajectories.model_dump(mode="json")
    return _looking_into(preset, digest, _TRAJECTORIES, preset.runs_that_feed("fig17"), values, ())


def _fiber_job(preset: Preset, digest: CodeDigest, job: str, values: dict[str, Any], task: str = "") -> dict[str, Any]:
    """Of the trainings of the Fiber Bundle Transformer: settings, threads, and the task's own data."""
    files: list[Path] = []
    if task == "characters":
        files, texts = _texts(preset)
        values = values | texts
    if task == FIBER_IMAGES:
        values = values | {"images": embedded.pins(FIBER_IMAGES)}
    values = values | {"threads": preset.resources.train.threads}
    return digest.explain([f"attngeo.jobs.{job}"], values=values, files=files, packages=_FIBER)


def _fiber_settings(preset: Preset, task: str) -> dict[str, Any]:
    """What the trainings on a task are made by; rank collapse has settings of its own."""
    settings = preset.fiber_bundle_settings.model_dump(mode="json", exclude={"collapse", "seeds"})
    return settings | {"tasks": {task: settings["tasks"][task]}}


def _fiber_task(preset: Preset, digest: CodeDigest, name: str) -> dict[str, Any]:
    run = preset.fiber_task_run(name)
    return _fiber_job(preset, digest, "fiber_tasks", _fiber_settings(preset, run.task) | {"seed": run.seed}, run.task)


def _rank_collapse(preset: Preset, digest: CodeDigest, seed: int) -> dict[str, Any]:
    settings = preset.fiber_bundle_settings.collapse.model_dump(mode="json", exclude={"seeds"})
    return _fiber_job(preset, digest, "rank_collapse", settings | {"seed": seed})


def _fiber_stamps(preset: Preset) -> Iterator[tuple[str, Callable[[CodeDigest], dict[str, Any]]]]:
    if preset.fiber_bundle is None:
        return
    for task in preset.fiber_rate_tasks:
        of_task = _fiber_settings(preset, task)
        yield f"fiber_rates/{task}", lambda d, t=task, s=of_task: _fiber_job(preset, d, "fiber_tasks", s, t)  # type: ignore[misc]
    for name in preset.fiber_task_runs:
        yield f"fiber_tasks/{name}", lambda d, name=name: _fiber_task(preset, d, name)  # type: ignore[misc]
    for seed in preset.rank_collapse_seeds:
        yield f"rank_collapse/s{seed}", lambda d, seed=seed: _rank_collapse(preset, d, seed)  # type: ignore[misc]
    everything = preset.fiber_bundle.model_dump(mode="json")
    yield "fiber_bundle", lambda d: _fiber_job(preset, d, "fiber_bundle", everything)


def _injectivity(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    model_id = preset.injectivity.model
    values = preset.injectivity.model_dump(mode="json") | {"images": embedded.pins(sources.PHOTOGRAPHS)}
    if model_id in preset.analysed_models:
        values["state"] = _source(preset, model_id, preset.analysed_models[model_id].source)
    return digest.explain(["attngeo.jobs.injectivity"], values=values, packages=_PRETRAINED)


def _score_rank(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.score_rank.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.score_rank"], values=values, packages=("torch", "numpy"))


def _attention_distance(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    model_id = preset.attention_distance.model
    values = preset.attention_distance.model_dump(mode="json") | {"images_from": embedded.pins(sources.PHOTOGRAPHS)}
    if model_id in preset.analysed_models:
        values["state"] = _source(preset, model_id, preset.analysed_models[model_id].source)
    runs = preset.runs_that_feed("fig1")
    return _looking_into(preset, digest, "attngeo.jobs.attention_distance", runs, values, _PRETRAINED)


def _attention_maps(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.attention_maps.model_dump(mode="json")
    return _looking_into(preset, digest, "attngeo.jobs.attention_maps", preset.runs_that_feed("fig8"), values, ())


def _walks_of_runs(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    settings = preset.connection_walk
    values = {key: getattr(settings, key) for key in ("images", "null_draws", "edges", "inits")}
    return _looking_into(
        preset, digest, "attngeo.jobs.connection_walk_runs", preset.runs_that_feed("fig10"), values, ()
    )


def _looking_into(
    preset: Preset,
    digest: CodeDigest,
    job: str,
    runs: Sequence[RunRow],
    values: dict[str, Any],
    packages: tuple[str, ...],
) -> dict[str, Any]:
    """The stamp of a job that builds the models of runs again: their kinds and rows belong to it."""
    modules, files = [job], list[Path]()
    for row in runs:
        of_run = _layers(row, digest)
        modules, files = modules + of_run[0], files + of_run[1]
    values = values | {"runs": [row.model_dump(mode="json", exclude={"feeds"}) for row in runs]}
    packages = tuple(dict.fromkeys((*packages, *_NUMERICS, *_IMAGES)))
    return digest.explain(modules, files=files, values=values, packages=packages)


def _operator_benchmark(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    return digest.explain(
        ["attngeo.jobs.operator_benchmark"],
        files=[preset.root / "benchmarks/port_limit.cpp"],
        values={
            **preset.benchmarks.operators.model_dump(mode="json"),
            "training_step": preset.benchmarks.training_step.model_dump(mode="json"),
        },
        packages=("torch", "timm", "numpy", "scipy", "scikit-learn"),
    )


def _solver_benchmark(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.benchmarks.solver.model_dump(mode="json")
    return _looking_into(preset, digest, "attngeo.jobs.solver_benchmark", preset.solver_runs, values, ())


def _edge_benchmark(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    modules = _attention(",".join(preset.benchmarks.edge.kinds), digest)[0]
    values = preset.benchmarks.edge.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.edge_benchmark", *modules], values=values, packages=_NUMERICS)


def _token_benchmark(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    settings = preset.benchmarks
    kinds = [kind for kind in settings.tokens.kinds if kind != FUSED_SOFTMAX]
    modules = _attention(",".join(["softmax", "laplacian", *kinds]), digest)[0]
    values = {
        "tokens": settings.tokens.model_dump(mode="json"),
        "training_step": settings.training_step.model_dump(mode="json"),
    }
    return digest.explain(["attngeo.jobs.token_benchmark", *modules], values=values, packages=_NUMERICS)


def _metric_costs(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    values = preset.benchmarks.metric_costs.model_dump(mode="json")
    return digest.explain(["attngeo.jobs.metric_costs"], values=values, packages=_NUMERICS)


def _gpu_timings(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    return digest.explain(
        ["attngeo.jobs.gpu_timings"],
        files=gpu_timings.measured_files(preset.root),
        values={"extension": digest.extension_digest()},
    )


def _target(preset: Preset, digest: CodeDigest, target: Target) -> dict[str, Any]:
    paper = preset.root / "src/attngeo/paper"
    modules = [target.module, *([] if target in PAGES.values() else ["attngeo.paper.render"])]
    files = [paper / name for name in target.data_files]
    values: dict[str, Any] = {"inputs": target.inputs(preset)}
    if target.kind == "page":
        values["made_from"] = made_from(preset)
    return digest.explain(modules, files=files, values=values, packages=_DRAWING)


def _licences(preset: Preset, digest: CodeDigest) -> dict[str, Any]:
    return digest.explain(["attngeo.jobs.licences"], values={"used": [asdict(used) for used in licences.used(preset)]})


def stamp_names(preset: Preset) -> Iterator[tuple[str, Callable[[CodeDigest], dict[str, Any]]]]:
    """Every stamp of a preset: its name (a path below results/<preset>/.code/) and what makes its content."""
    for name in preset.datasets:
        yield f"data/{name}", lambda d, name=name: _dataset(preset, d, name)  # type: ignore[misc]
    for row in preset.runs:
        yield f"runs/{row.run_id}", lambda d, row=row: _run(preset, d, row)  # type: ignore[misc]
    for name in preset.decoder_runs:
        yield f"decoders/{name}", lambda d, name=name: _decoder(preset, d, name)  # type: ignore[misc]
    for model_id in preset.analysed_models:
        yield f"connection_walk/{model_id}", lambda d, model_id=model_id: _walk(preset, d, model_id)  # type: ignore[misc]
    yield "connection_walk_runs", lambda d: _walks_of_runs(preset, d)
    yield "variational", lambda d: _variational(preset, d)
    for model_id in preset.analysed_models:
        yield f"trajectories/{model_id}", lambda d, model_id=model_id: _trajectories(preset, d, model_id)  # type: ignore[misc]
    yield "trajectories_runs", lambda d: _trajectories_of_runs(preset, d)
    yield from _fiber_stamps(preset)
    yield "injectivity", lambda d: _injectivity(preset, d)
    yield "score_rank", lambda d: _score_rank(preset, d)
    yield "attention_distance", lambda d: _attention_distance(preset, d)
    yield "attention_maps", lambda d: _attention_maps(preset, d)
    yield "benchmarks/operators", lambda d: _operator_benchmark(preset, d)
    yield "benchmarks/solver", lambda d: _solver_benchmark(preset, d)
    yield "benchmarks/edge", lambda d: _edge_benchmark(preset, d)
    yield "benchmarks/tokens", lambda d: _token_benchmark(preset, d)
    yield "benchmarks/metric_costs", lambda d: _metric_costs(preset, d)
    yield "benchmarks/gpu", lambda d: _gpu_timings(preset, d)
    yield "licences", lambda d: _licences(preset, d)
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


def evaluation_digest(preset: Preset, attention: str | None) -> str:
    """The digest of the code that evaluates a model, of ours with that attention kind or, with None, of timm's."""
    digest = code_digests(preset.root)
    modules, files = _attention(attention, digest) if attention else ([], [])
    if attention:
        modules = [*modules, *(place.rpartition(":")[0] for place in FEED_FORWARDS.values())]
    return str(
        digest.explain(["attngeo.jobs.evaluate", *modules], files=files, packages=(*_NUMERICS, *_IMAGES))["digest"]
    )


def digest_outside_presets(root: Path, module: str, values: dict[str, Any]) -> str:
    """The digest of a module that measures a pretrained model outside of a preset, with what it was asked."""
    return str(code_digests(root).explain([module], values=values, packages=_PRETRAINED)["digest"])


def current_stamp(preset: Preset, name: str) -> dict[str, Any]:
    """The stamp of a job as its code is now, for jobs that are started by hand."""
    return dict(stamp_names(preset))[name](code_digests(preset.root))
