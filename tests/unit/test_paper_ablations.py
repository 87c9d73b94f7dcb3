"""The ablation tables: paired differences, the rule that explains, what is missing and what failed; invented runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from attngeo.errors import UserError
from attngeo.files import write_json
from attngeo.paper import claims
from attngeo.paper.render import Tabulated, write_table
from attngeo.paper.tables import tab01_classification, tab02_lambda, tab03_solver, tab04_decisions
from attngeo.paper.targets import TABLES
from attngeo.run_options import parse_options
from tests.unit import paper_results
from tests.unit.paper_results import ALL_FIVE, NO_SCALE, SEPARATE, Preset, Run, write_ablation

REFERENCE = (80.0, 81.0, 79.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results" / "demo"


def ours(table: Tabulated, **labels: object) -> pd.DataFrame:
    frame = table.frame[table.frame["kind"] == "ours"]
    for name, value in labels.items():
        frame = frame[frame[name.replace("_", " ")] == value]
    return frame


def test_a_difference_is_paired_by_seed_and_its_interval_is_students(folder: Path) -> None:
    values = (78.0, 78.9, 77.2)
    table = tab02_lambda.tabulate(write_ablation(folder, {"": REFERENCE, "lambda_=2": values}))
    reference, changed = ours(table).to_dict("records")[::-1]
    assert (reference["lambda"], changed["lambda"]) == (4.0, 2.0)
    assert math.isnan(reference["difference"])
    differences = pd.Series(values) - pd.Series(REFERENCE)
    half = stats.t.ppf(0.975, 2) * differences.std() / math.sqrt(3)
    assert changed["difference"] == pytest.approx(differences.mean())
    assert (changed["low"], changed["high"]) == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert (changed["n"], changed["converged"], changed["diverged"]) == (3, "3 of 3", "0 of 3")
    assert "different from 4 by its interval: 2" in table.caption


def test_one_seed_has_no_interval_and_that_is_said(folder: Path) -> None:
    table = tab02_lambda.tabulate(write_ablation(folder, {"": (80.0,), "lambda_=2": (78.5,)}))
    (changed,) = ours(table, **{"lambda": 2.0}).to_dict("records")
    assert changed["difference"] == -1.5
    assert math.isnan(changed["low"])
    assert math.isnan(changed["std"])
    assert "With one seed there is no interval" in table.caption
    assert "by its interval: none" in table.caption


def test_published_rows_stand_above_and_are_marked(folder: Path) -> None:
    frame = tab02_lambda.tabulate(write_ablation(folder, {"": (80.0,)})).frame
    paper = frame[frame["kind"] == "paper"]
    assert list(paper["lambda"]) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert list(paper["top-1 (%)"]) == [79.4, 79.6, 80.1, 81.4, 78.5]
    assert paper["n"].isna().all()
    assert paper["difference"].round(1).tolist()[-1] == -2.9
    assert list(frame["kind"])[-1] == "ours"


def test_solver_settings_are_those_that_ran_defaults_included(folder: Path) -> None:
    runs = ("", "iterations=5", "start=identity; iterations=10", "solver=cholesky", "solver=conjugate_gradient")
    values = {options: (80.0, 79.0) for options in (*runs, "iterations=5; backward=loop; lambda_=2")}
    frame = ours(tab03_solver.tabulate(write_ablation(folder, values)))
    found = {
        tuple(row)
        for row in frame[["solver", "start", "iterations", "products", "gradient", "other options"]].to_numpy()
    }
    assert found == {
        ("newton_schulz", "paper", 20, 40, "implicit", None),
        ("newton_schulz", "paper", 5, 10, "implicit", None),
        ("newton_schulz", "identity", 10, 20, "implicit", None),
        ("newton_schulz", "paper", 5, 10, "loop", "lambda_=2"),
        ("conjugate_gradient", None, 40, 40, "implicit", None),
        ("cholesky", None, None, None, None, None),
    }
    assert frame.iloc[0]["iterations"] == 20, "the reference comes first"
    paper = tab03_solver.tabulate(write_ablation(folder, values)).frame.query("kind == 'paper'")
    assert paper["difference"].dropna().round(1).tolist() == [-2.2, -2.4]
    caption = tab03_solver.tabulate(write_ablation(folder, values)).caption
    assert "in the paper -2.2 (LaplacianFormer-T), -2.4 (LaplacianFormer-S); here +0.0 [+0.0, +0.0]" in caption


def test_the_defaults_that_tables_print_are_those_of_the_layers() -> None:
    from attngeo.layers.landmark import DEFAULT_ITERATIONS, SOLVERS
    from attngeo.layers.laplacian import LaplacianAttention

    assert set(tab03_solver.DEFAULTS) == set(SOLVERS)
    for solver, defaults in tab03_solver.DEFAULTS.items():
        layer = LaplacianAttention(8, 2, solver=solver)
        assert layer.lambda_ == tab02_lambda.LAMBDA
        live = {"start": layer.start, "iterations": layer.iterations, "backward": layer.backward_mode}
        assert defaults == {name: live[name] for name in defaults}
        assert ("iterations" in defaults) == (solver in DEFAULT_ITERATIONS)
    assert LaplacianAttention(8, 2).solver == tab03_solver.SOLVER


CHOICES = {
    "": REFERENCE,
    "iterations=5; recipe.non_finite=record": (78.0, 78.9, 77.2),  # a drop of 2 points, much the same for every seed
    SEPARATE: (79.5, 80.4, 78.6),  # of half a point
    "statistics=batch": (74.0, 81.0, 79.0),  # of two points, by one seed
    NO_SCALE: (80.5, 81.5, 79.5),  # a gain
    "init=default": (78.5, 79.6, 77.4),
    "normalization=none": (70.0, 71.0, 69.0),
    ALL_FIVE: (70.0, 71.5, 68.0),
}


def test_a_choice_explains_by_the_rule_and_by_nothing_else(folder: Path) -> None:
    paths = write_ablation(folder, CHOICES)
    paths += write_ablation(folder, {"": (84.0, 84.5, 83.0)}, kind="softmax", residual=None)
    table = tab04_decisions.tabulate(paths)
    frame = ours(table).set_index("choice")
    assert list(ours(table)["role"]) == ["reference", "other kind", *5 * ["replication"], "replication, all", "further"]
    assert list(ours(table)["choice"])[2:7] == list(tab04_decisions.CHOICES)
    assert frame.loc[list(tab04_decisions.CHOICES), "explains"].tolist() == ["yes", "no", "undecided", "no", "yes"]
    assert frame.loc["normalization=none", "explains"] == "yes"
    drop = 10 + 1 / 6
    assert frame.loc["5 solver iterations", "share (%)"] == pytest.approx(100 * (1.9 + 2 / 30) / drop, abs=0.1)
    assert frame.loc[tab04_decisions.TOGETHER, "share (%)"] == pytest.approx(100)
    assert math.isnan(frame.loc["this project's defaults", "share (%)"])
    softmax = ours(table, role="other kind").iloc[0]
    assert softmax["difference"] == pytest.approx(sum((84.0, 84.5, 83.0)) / 3 - 80)
    assert softmax["converged"] is None
    caption = table.caption
    assert "all five together change the gap to softmax by -10.2 (± 1.9) points, Laplacian's own top-1 by" in caption
    assert "Alone, a part of it is explained by 5 solver iterations" in caption
    assert "ruled out: separate queries, keys and landmarks, no 1/N scale" in caption
    assert "undecided: statistics of the batch" in caption
    assert "Laplacian minus softmax: -3.8 points with the defaults (n = 3), -14.0 with all five together" in caption
    assert "(n = 3; softmax with this project's initialisation)" in caption
    assert "-12.5 to -9.0 on CIFAR-100 at 224" in caption


def test_a_choice_of_another_kind_is_a_control_beside_its_own_defaults(folder: Path) -> None:
    paths = write_ablation(folder, CHOICES)
    paths += write_ablation(
        folder, {"": (84.0, 84.5, 83.0), "init=default": (83.0, 83.5, 82.0)}, kind="softmax", residual=None
    )
    table = tab04_decisions.tabulate(paths)
    control = ours(table, role="other kind").dropna(subset=["choice"]).squeeze()
    assert (control["choice"], control["attention"]) == ("default initialisation", "softmax")
    assert control["difference"] == pytest.approx(-1)
    assert control["explains"] is None or math.isnan(control["explains"])
    frame = ours(table).set_index("choice")
    alone = frame[frame["role"] == "replication"].loc["default initialisation"]
    assert (alone["difference"], alone["gap change"]) == (pytest.approx(-1.5), pytest.approx(-0.5)), (
        "softmax falls, too"
    )
    assert frame.loc[tab04_decisions.TOGETHER, "gap change"] == pytest.approx(-9 - 1 / 6)
    assert frame.loc["5 solver iterations", "gap change"] == frame.loc["5 solver iterations", "difference"]
    assert "-3.8 points with the defaults (n = 3), -13.0 with all five together" in table.caption
    assert "softmax with the default initialisation" in table.caption


def test_what_leaving_a_choice_out_brings_back_is_paired_by_seed(folder: Path) -> None:
    but_separate = f"iterations=5; statistics=batch; {NO_SCALE}; init=default"
    but_init = f"iterations=5; {SEPARATE}; statistics=batch; {NO_SCALE}"
    runs = CHOICES | {but_separate: (79.0, 80.4, 77.0), but_init: (69.0, 70.4, 67.1)}
    paths = write_ablation(folder, runs)
    softmax = {"": (84.0, 84.5, 83.0), "init=default": (85.0, 85.5, 84.0)}
    table = tab04_decisions.tabulate(paths + write_ablation(folder, softmax, kind="softmax", residual=None))
    left_out = ours(table, role="replication, all but one").set_index("choice")
    separate, init = (f"all but {name}" for name in list(tab04_decisions.CHOICES)[1::3])
    assert list(left_out.index) == [separate, init]
    assert left_out.loc[separate, "brings back"] == pytest.approx((9.0 + 8.9 + 9.0) / 3)
    assert left_out.loc[separate, "back ±"] == pytest.approx(4.302653 * 0.0577350 / math.sqrt(3), rel=1e-4)
    # With the defaults' initialisation softmax is a point lower, so that the gap is a point better.
    assert left_out.loc[init, "brings back"] == pytest.approx((-1.0 - 1.1 - 0.9) / 3 + 1.0, abs=1e-9)
    assert "Left out of all five, a choice brings back, in points: separate queries" in table.caption
    assert "needed for it, by the same rule: separate queries, keys and landmarks. " in table.caption


def test_unlike_groups_are_named(folder: Path) -> None:
    paths = write_ablation(folder, {"": REFERENCE, **{f"lambda_={number}": REFERENCE for number in range(5, 25)}})
    table = tab02_lambda.tabulate(paths)
    assert "Solver not converged" not in table.caption
    named = table.caption.partition("More than 5% off in parameters: ")[2].partition(". ")[0]
    assert "lambda_=24 (+5.9%)" in named
    assert "lambda_=20" not in named
    lost = tab02_lambda.tabulate(write_ablation(folder / "b", {"": REFERENCE, "lambda_=2": REFERENCE}, residual=0.1))
    named = lost.caption.partition("Solver not converged in every run, so that a difference may be its: ")[2]
    assert set(named.partition(". ")[0].split("; ")) == {"laplacian, no options", "lambda_=2"}


def test_a_failure_that_one_seed_makes_is_undecided(folder: Path) -> None:
    table = tab04_decisions.tabulate(write_ablation(folder, {"": REFERENCE, ALL_FIVE: (74.0, 80.5, 78.0)}))
    assert ours(table, role="replication, all").iloc[0]["explains"] == "undecided"
    assert "which the rule leaves undecided" in table.caption


def test_few_seeds_decide_nothing_and_a_failure_that_is_none_is_said_to_be(folder: Path) -> None:
    few = {options: values[:2] for options, values in CHOICES.items()}
    table = tab04_decisions.tabulate(write_ablation(folder, few))
    assert set(ours(table)["explains"].dropna()) == {"too few seeds"}
    assert "(n = 2): too few seeds for the rule" in table.caption
    harmless = CHOICES | {ALL_FIVE: (80.1, 81.0, 79.2)}
    table = tab04_decisions.tabulate(write_ablation(folder / "b", harmless))
    assert "by the rule no failure" in table.caption
    assert ours(table)["share (%)"].isna().all()
    some = {options: CHOICES[options] for options in ("", "init=default", ALL_FIVE)}
    table = tab04_decisions.tabulate(write_ablation(folder / "c", some))
    assert "undecided: 5 solver iterations, separate queries" in table.caption


def test_a_run_that_diverged_is_counted_named_and_never_left_out(folder: Path) -> None:
    paths = write_ablation(folder, {"": REFERENCE, ALL_FIVE: (70.0, 10.0, 69.0)}, diverged=[1])
    table = tab04_decisions.tabulate(paths)
    row = ours(table, role="replication, all").iloc[0]
    assert (row["n"], row["diverged"], row["converged"], row["steps left out"]) == (3, "1 of 3", "2 of 3", 7)
    assert row["residual"] == math.inf
    assert row["top-1 (%)"] == pytest.approx(149 / 3)
    assert "Diverged: invented-a-laplacian" in table.caption
    for path in write_table(table, folder / "tab4"):
        assert path.stat().st_size
    others = tab01_classification.tabulate(paths).frame.query("kind == 'ours'").set_index("attention")
    assert others.loc["laplacian", "n"] == 3
    lost = others[others.index.str.contains("iterations")].iloc[0]
    assert (lost["n"], lost["top-1 (%)"]) == (2, 69.5)


def test_a_residual_that_is_no_number_is_shown_as_none(folder: Path) -> None:
    paths = write_ablation(folder, {"": REFERENCE, "iterations=5": REFERENCE})
    final = json.loads(paths[4].read_text())
    write_json(paths[4], final | {"solver_residual_max": math.nan, "solver_converged": False})
    paths += write_ablation(folder, {"": REFERENCE}, kind="softmax", residual=None)
    table = tab04_decisions.tabulate(paths)
    row = ours(table, choice="5 solver iterations").iloc[0]
    assert math.isnan(row["residual"])
    assert row["converged"] == "2 of 3"
    assert ours(table, role="other kind").iloc[0]["converged"] is None


@pytest.mark.parametrize("module", [tab02_lambda, tab03_solver, tab04_decisions])
def test_a_missing_reference_is_named(folder: Path, module: object) -> None:
    name = {tab02_lambda: "tab2", tab03_solver: "tab3"}.get(module, "tab4")
    tabulate: Callable[[list[Path]], Tabulated] = module.tabulate  # type: ignore[attr-defined]
    paths = write_ablation(folder, {"": REFERENCE[:2], "iterations=5": REFERENCE})
    with pytest.raises(UserError) as caught:
        tabulate(paths)
    for word in (name, "iterations=5-s2", "laplacianformer_micro", "invented-a", "invented-ablation", "seed 2"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match="has no reference"):
        tabulate(write_ablation(folder / "b", {"iterations=5": (70.0,)}))
    with pytest.raises(UserError, match=f"feeds of runs in the preset's runs.tsv, or take it out|add {name}"):
        tabulate([])
    other_recipe = write_ablation(folder / "c", {"": REFERENCE})
    other_recipe += write_ablation(folder / "c", {"iterations=5": REFERENCE}, recipe="another")
    with pytest.raises(UserError, match="recipe another"):
        tabulate(other_recipe)


def test_what_happens_to_non_finite_numbers_is_no_option_to_compare(folder: Path) -> None:
    twice = {"": (80.0,), "iterations=5": (70.0,), "iterations=5; recipe.non_finite=record": (71.0,)}
    with pytest.raises(UserError, match="share data set"):
        tab03_solver.tabulate(write_ablation(folder, twice))
    table = tab04_decisions.tabulate(write_ablation(folder / "b", {"": (80.0,), "recipe.lr=1e-3": (70.0,)}))
    assert ours(table)["choice"].tolist() == ["this project's defaults", "recipe.lr=0.001"]


def test_runs_with_options_are_evidence_for_no_claim_and_hold_up_no_ledger(folder: Path) -> None:
    runs = (Run("plain", "m", "d", 0), Run("changed", "m", "d", 0, ("tab2",), dict(parse_options("lambda_=2"))))
    inputs = TABLES["tab9"].inputs(Preset("p", runs=runs))
    assert "runs/plain/final.json" in inputs
    assert "runs/changed/final.json" not in inputs
    paths = write_ablation(folder, {"": REFERENCE, "lambda_=2": REFERENCE})
    assert set(claims.read_evidence(paths)["run_id"]) == {p.parent.name for p in paths if "plain" in p.parent.name}
    assert claims.read_evidence(paths[3:]).empty


def test_a_run_with_options_is_a_kind_of_its_own_elsewhere(folder: Path) -> None:
    paths = write_ablation(folder, {"": REFERENCE, "lambda_=2": REFERENCE})
    kinds = set(tab01_classification.tabulate(paths).frame.query("kind == 'ours'")["attention"])
    assert kinds == {"laplacian", "laplacian (lambda_=2)"}


def test_made_up_results_feed_the_ablations(folder: Path) -> None:
    inputs = paper_results.write_everything(folder)
    for module, name in ((tab02_lambda, "tab2"), (tab03_solver, "tab3"), (tab04_decisions, "tab4")):
        assert len(ours(module.tabulate(inputs[name])))
