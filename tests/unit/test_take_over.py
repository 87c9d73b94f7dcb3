"""What is taken from a snapshot, and what is not."""

import json
import sys
from pathlib import Path

import pytest

from attngeo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from take_over import Kept, kept, takeable  # noqa: E402

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
    return folder


def test_every_record_belongs_to_a_stamp_and_brings_its_companions(snapshot: Path) -> None:
    found = {job.stamp: (job.digest, {path.name for path in job.files}) for job in kept(snapshot)}
    assert found == {
        "runs/a-s0": ("1", {"final.json", "metrics.jsonl"}),
        "connection_walk/model@q4_1": ("2", {"model@q4_1.json"}),
        "attention_maps": ("2", {"attention_maps.json", "attention_maps.npz"}),
        "benchmarks/edge": ("2", {"edge.json"}),
    }


def test_only_what_this_tree_would_make_the_same_is_taken(snapshot: Path, tmp_path: Path) -> None:
    digests = {"runs/a-s0": "1", "attention_maps": "another", "benchmarks/edge": "2"}
    results = tmp_path / "results"
    _write(results / "benchmarks/edge.json", "made here")
    wanted, others = takeable(kept(snapshot), digests, results)
    assert [job.stamp for job in wanted] == ["runs/a-s0"]
    assert sorted(others) == ["attention_maps", "connection_walk/model@q4_1"]


def test_nothing_kept_means_nothing_to_take(tmp_path: Path) -> None:
    assert list(kept(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest"', "{}"])
def test_a_damaged_record_is_named(snapshot: Path, text: str) -> None:
    _write(snapshot / "runs/a-s0/final.json", text)
    with pytest.raises(UserError, match=r"final\.json"):
        list[Kept](kept(snapshot))
