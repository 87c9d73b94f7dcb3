"""What the workflow imports at every parse stays light."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from attngeo.config import Preset, load_preset
from attngeo.errors import UserError
from attngeo.jobs import stamps
from attngeo.jobs.planned import refuse_to_change

ROOT = Path(__file__).resolve().parents[2]


def test_planning_imports_no_torch() -> None:
    heavy = "{'torch', 'scipy', 'pandas', 'mlflow'}"
    code = f"import sys, attngeo.jobs.planned, attngeo.cli; print(sorted({heavy} & set(sys.modules)))"
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


def test_whoever_limits_gpus_is_told_to_limit_memory_too() -> None:
    """Snakemake's `--resources` replaces every limit of a profile."""
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/guide/*.md"),
        *ROOT.glob("profiles/*/*.yaml"),
        *ROOT.glob("src/**/*.py"),
    ]
    named = [line for file in files for line in file.read_text("utf-8").splitlines() if "--resources gpu=" in line]
    assert len(named) >= 3
    for line in named:
        assert re.search("--resources gpu=.* mem_mb=", line), line


def test_the_profile_of_one_machine_lets_a_training_run_on_each_of_its_gpus() -> None:
    limits = yaml.safe_load((ROOT / "profiles/gpu/profile.yaml").read_text("utf-8"))["resources"]
    training = load_preset(ROOT, "imagenet").resources.train
    assert limits["gpu"] // training.gpu * training.mem_mb <= limits["mem_mb"]


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Preset]:
    """Makes the preset smoke, with changed keys, of a project that shares this one's files but not its results."""
    for name in ("config", "src", "cuda_ext", "benchmarks", "requirements.lock", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".snakemake/locks").mkdir(parents=True)
    return lambda **changed: load_preset(tmp_path, "smoke", changed)


def test_stamps_that_a_running_snakemake_planned_with_stay(planned: Callable[..., Preset]) -> None:
    preset = planned()
    stamps.write_stamps(preset)
    changed = planned(variational={"tokens": 7})
    refuse_to_change(changed)
    lock = preset.root / ".snakemake/locks/0.input.lock"
    lock.write_text("results/smoke/.code/variational.txt\nresults/tracking.json\n")
    refuse_to_change(preset)
    refuse_to_change(planned(injectivity={"images": 3}))  # its stamp is no input of what runs
    with pytest.raises(UserError, match=r"behind variational changed[\s\S]*snakemake --unlock"):
        refuse_to_change(changed)
    stamps.stamp_path(preset, "variational").write_text("{")
    refuse_to_change(changed)
    lock.unlink()
    refuse_to_change(changed)
