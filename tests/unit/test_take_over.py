"""What is taken from a snapshot, and what is not."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from attngeo.config import load_preset
from attngeo.errors import UserError
from attngeo.jobs.stamps import stamp_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from take_over import Kept, kept, made_first, takeable  # noqa: E402

sys.path.pop(0)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "docs é" / "measured"
    _write(folder / "runs/a-s0/final.json", json.dumps({"digest": "1"}))
    _write(folder / "runs/a-s0/metrics.jsonl", "")
    record = json.dumps({"provenance": {"code_digest": "2"}, "records": []})
    _write(folder / "analyses/connection_walk/model@q4_1.json", record)
    _write(folder / "analyses/attention_maps.json", record)
    _write(folder / "analyses/attention_maps.npz", "")
    _write(folder / "benchmarks/edge.json", record)
    _write(folder / "benchmarks/low_rank_metric.json", record)
    for name in ("fiber_bundle", "fiber_tasks/copy-s0", "predictions", "rank_collapse/s0"):
        _write(folder / f"analyses/{name}.json", record)
    return folder


def test_every_record_belongs_to_a_stamp_and_brings_its_companions(snapshot: Path) -> None:
    jobs = list(kept(snapshot))
    found = {job.stamp: (job.digest, {path.name for path in job.files}) for job in jobs}
    assert found == {
        "runs/a-s0": ("1", {"final.json", "metrics.jsonl"}),
        "connection_walk/model@q4_1": ("2", {"model@q4_1.json"}),
        "attention_maps": ("2", {"attention_maps.json", "attention_maps.npz"}),
        "benchmarks/edge": ("2", {"edge.json"}),
        "benchmarks/metric_costs": ("2", {"low_rank_metric.json"}),
        "fiber_bundle": ("2", {"predictions.json"}),
        "fiber_tasks/copy-s0": ("2", {"copy-s0.json"}),
        "rank_collapse/s0": ("2", {"s0.json"}),
    }
    analyses = [str(job.files[0]) for job in jobs if str(job.files[0]).startswith("analyses/")]
    assert analyses[-2:] == ["analyses/fiber_bundle.json", "analyses/predictions.json"], "they are made of the others"


def test_every_record_of_the_snapshots_in_git_has_a_stamp() -> None:
    for snapshot in sorted((ROOT / "docs/measured").glob("*/analyses")):
        known = {name for name, _ in stamp_names(load_preset(ROOT, snapshot.parent.name))}
        assert {job.stamp for job in kept(snapshot.parent)} <= known


def test_only_what_this_tree_would_make_the_same_is_taken(snapshot: Path, tmp_path: Path) -> None:
    digests = {"runs/a-s0": "1", "attention_maps": "another", "benchmarks/edge": "2"}
    shutil.rmtree(snapshot / "analyses/fiber_tasks")
    shutil.rmtree(snapshot / "analyses/rank_collapse")
    for name in ("benchmarks/low_rank_metric", "analyses/fiber_bundle", "analyses/predictions"):
        (snapshot / f"{name}.json").unlink()
    results = tmp_path / "results"
    _write(results / "benchmarks/edge.json", "made here")
    wanted, others = takeable(kept(snapshot), digests, results)
    assert [job.stamp for job in wanted] == ["runs/a-s0"]
    assert sorted(others) == ["attention_maps", "connection_walk/model@q4_1"]


def test_nothing_kept_means_nothing_to_take(tmp_path: Path) -> None:
    assert list(kept(tmp_path)) == []


@pytest.mark.parametrize("tasks", [("recall",), ("recall", "fashion-mnist")])
def test_images_of_the_fiber_tasks_are_made_before_records_are_taken(tasks: tuple[str, ...]) -> None:
    preset = load_preset(ROOT, "smoke")
    settings = preset.fiber_bundle_settings
    settings = settings.model_copy(update={"tasks": {name: settings.tasks[name] for name in tasks}})  # type: ignore[index]
    preset = preset.model_copy(update={"runs": (), "fiber_bundle": settings})
    assert ("results/embedded/fashion-mnist.json" in made_first(preset)) is ("fashion-mnist" in tasks)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest"', "{}"])
def test_a_damaged_record_is_named(snapshot: Path, text: str) -> None:
    _write(snapshot / "runs/a-s0/final.json", text)
    with pytest.raises(UserError, match=r"final\.json"):
        list[Kept](kept(snapshot))
