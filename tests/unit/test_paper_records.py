"""Records survive the way to disk and back, and a damaged file is named."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from attngeo.errors import UserError
from attngeo.paper import records
from attngeo.paper.results import preset_name, results_folder


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1 + 0.2, -0.0, 5e-324])
def test_value_and_label_survive_the_round_trip_bit_by_bit(tmp_path, value):
    record = records.Record(metric="m", value=value, n=3, labels={"layer": 2, "step": 0.1, "head": -1, "form": "é|&"})
    records.write(tmp_path / "a.json", [record], {"device": "cpu", "nested": {"a": 1}})
    read = records.read_file(tmp_path / "a.json")
    assert np.float64(read.records[0].value).tobytes() == np.float64(value).tobytes()
    assert read.records[0].labels == record.labels
    assert read.provenance == {"device": "cpu", "nested": {"a": 1}}


def test_file_is_strict_json_with_words_for_what_json_lacks(tmp_path):
    records.write(tmp_path / "a.json", [records.Record(metric="m", value=math.nan, n=1)])
    text = (tmp_path / "a.json").read_text()
    assert '"NaN"' in text
    assert ": NaN" not in text


def test_empty_file_reads_as_an_empty_frame(tmp_path):
    records.write(tmp_path / "a.json", [], {"device": "cpu"})
    frame = records.read(tmp_path / "a.json")
    assert len(frame) == 0
    assert list(frame.columns) == list(records.FIXED_COLUMNS)


def test_frame_becomes_records_with_labels_and_missing_cells_left_out(tmp_path):
    frame = pd.DataFrame(
        {
            "quantity": ["a", "b"],
            "value": [math.nan, math.inf],
            "n": np.array([1, 7], dtype=np.int32),
            "spread": [math.nan, 0.5],
            "step": [math.nan, 0.25],
            "layer": [0, 3],
        }
    )
    file = records.from_frame(frame, provenance={"device": "cpu"}, source="test", run_ids=["r1"])
    assert [record.labels for record in file.records] == [{"layer": 0}, {"step": 0.25, "layer": 3}]
    assert [record.spread for record in file.records] == [None, 0.5]
    records.write(tmp_path / "a.json", file)
    read = records.read(tmp_path / "a.json")
    assert list(read["metric"]) == ["a", "b"]
    assert math.isnan(read["value"][0])
    assert read["value"][1] == math.inf
    assert read.attrs["provenance"] == {"device": "cpu"}
    assert list(read["run_ids"]) == [["r1"], ["r1"]]


@pytest.mark.parametrize("column", ["value", "n", "metric"])
def test_frame_without_a_required_column_is_refused_by_name(column):
    frame = pd.DataFrame({"metric": ["a"], "value": [1.0], "n": [1]}).drop(columns=column)
    with pytest.raises(ValueError, match=column):
        records.from_frame(frame)


def test_row_without_n_is_refused():
    with pytest.raises(ValueError, match="without n"):
        records.from_frame(pd.DataFrame({"metric": ["a"], "value": [1.0], "n": [math.nan]}))


@pytest.mark.parametrize(
    "changes", [{"n": -1}, {"origin": "theirs"}, {"surprise": 1}, {"labels": {"value": 1}}, {"labels": {"a": "NaN"}}]
)
def test_record_with_an_impossible_field_is_refused(changes):
    with pytest.raises(ValidationError):
        records.Record(**({"metric": "m", "value": 1.0, "n": 1} | changes))


@pytest.mark.parametrize("text", ["", "{", '{"records": 3}', '{"records": [{"metric": "m"}]}', '{"schema_version": 2}'])
def test_damaged_file_is_named_with_a_remedy(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"broken\.json"):
        records.read(path)


def test_a_preset_is_known_by_its_own_folder_whatever_lies_above(tmp_path: Path) -> None:
    results = tmp_path / "runs/analyses/benchmarks/project/results/demo"
    files = [results / path for path in ("runs/a/final.json", "analyses/connection_walk/b.json", "benchmarks/c.json")]
    assert (results_folder(files), preset_name(files)) == (results, "demo")
