"""What the workflow imports at every parse stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

from attngeo.config import load_preset
from attngeo.jobs import stamps

ROOT = Path(__file__).resolve().parents[2]


def test_planning_imports_no_torch() -> None:
    code = "import sys, attngeo.jobs.stamps; print(sorted({'torch', 'scipy', 'pandas', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["smoke", "study"])
def test_every_model_that_a_walk_takes_has_paths_too(name: str) -> None:
    """Our own decoders among them: they are asked for by name, if by no figure."""
    preset = load_preset(ROOT, name)
    names = dict(stamps.stamp_names(preset))
    assert preset.decoder_models
    for model_id in preset.analysed_models:
        assert {f"connection_walk/{model_id}", f"trajectories/{model_id}"} <= set(names)


def test_the_metrics_operators_count_for_the_runs_that_use_them_alone() -> None:
    preset = load_preset(ROOT, "smoke")
    digests = stamps.code_digests(ROOT)
    names = dict(stamps.stamp_names(preset))
    operators = "attngeo.ops.low_rank_metric.naive"
    for row in preset.runs:
        modules = names[f"runs/{row.run_id}"](digests)["modules"]
        assert (operators in modules) == row.model.startswith("fiberformer_")
        assert ("attngeo.layers.fiber_feed_forward" in modules) == row.model.startswith("fiberformer_")
