"""The analysis of claims P1.a-c: orders come out as derived, and every control fails as it must."""

import math

import pandas as pd
import pytest

from attngeo.errors import UserError
from attngeo.variational import analyze_sphere, checks
from attngeo.variational.checks import COLUMNS, fit_slope
from tests.tolerances import (
    CLUSTERING_TIME_COARSE,
    FIRST_VARIATION_SLOPE,
    FITTED_ORDER,
    FLAT_SLOPE,
    PREDICTED_RESPONSE_RELATIVE,
    STATIONARY_DISTANCE,
    STATIONARY_SLOPE,
    TANGENCY,
    VARIATIONAL_CONTROL_FLOOR,
)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return analyze_sphere()


def _slopes(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["quantity"] == "slope"]


def test_frame_has_the_promised_columns_and_no_missing_value(frame: pd.DataFrame) -> None:
    assert list(frame.columns) == COLUMNS
    assert not frame["value"].isna().any()
    assert not frame.duplicated(["check", "method", "control", "quantity", "step"]).any()


def test_velocity_is_tangent_and_norms_are_kept(frame: pd.DataFrame) -> None:
    tested = frame[frame["check"].isin(["tangency", "norm_drift"]) & (frame["control"] == "none")]
    assert (tested["value"] <= TANGENCY).all()
    controls = frame[(frame["check"] == "tangency") & (frame["control"] != "none")]
    assert (controls["value"] > VARIATIONAL_CONTROL_FLOOR).all()


@pytest.mark.parametrize(
    "check",
    [
        "integrator_order",
        "energy_dissipation",
        "energy_dissipation_path",
        "euler_lagrange",
        "step_local_error",
        "stationary_path",
    ],
)
def test_errors_fall_at_the_derived_order(frame: pd.DataFrame, check: str) -> None:
    fits = _slopes(frame)[lambda rows: (rows["check"] == check) & (rows["control"] == "none")]
    assert len(fits) >= 2
    assert ((fits["value"] - fits["expected"]).abs() <= FITTED_ORDER).all(), fits


@pytest.mark.parametrize("tokens", [5, 8])
def test_the_energy_balance_is_fitted_at_its_order_for_every_number_of_tokens_and_controls_do_not_fall(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_CHECKS", (checks._energy_dissipation,))
    found = analyze_sphere(seeds=range(5), tokens=tokens)
    fits = _slopes(found)
    tested = fits["control"] == "none"
    assert tested.sum() == 4
    assert ((fits["value"] - fits["expected"]).abs()[tested] <= FITTED_ORDER).all(), fits
    assert (fits["value"].abs()[~tested] < FLAT_SLOPE).all(), fits
    controls = found[(found["control"] != "none") & (found["quantity"] != "slope")]
    assert (controls["value"] > VARIATIONAL_CONTROL_FLOOR).all()


@pytest.mark.parametrize("check", ["transversality", "multiplier"])
def test_the_conditions_at_a_free_end_and_of_the_multiplier_are_met_at_the_order_of_the_stencil(
    frame: pd.DataFrame, check: str
) -> None:
    fits = _slopes(frame)[lambda rows: (rows["check"] == check) & (rows["control"] == "none")]
    assert float(fits["value"].iloc[0]) == pytest.approx(4, abs=FITTED_ORDER)


@pytest.mark.parametrize(
    "check",
    [
        "energy_dissipation",
        "energy_dissipation_path",
        "euler_lagrange",
        "minimiser",
        "stationary_path",
        "transversality",
    ],
)
def test_controls_stay_off_however_small_the_step(frame: pd.DataFrame, check: str) -> None:
    controls = frame[(frame["check"] == check) & (frame["control"] != "none")]
    is_slope = controls["quantity"] == "slope"
    assert {"one_over_n", "softmax_normalised"} <= set(controls["control"])
    assert (controls.loc[~is_slope, "value"] > VARIATIONAL_CONTROL_FLOOR).all()
    assert (controls.loc[is_slope, "value"].abs() < FLAT_SLOPE).all()


def test_first_variation_slopes_are_one_and_two_at_the_stationary_path(frame: pd.DataFrame) -> None:
    fits = _slopes(frame)[lambda rows: rows["check"].str.startswith("first_variation")]
    stationary = (fits["method"] == "flow_path") & (fits["control"] == "none")
    assert stationary.sum() == 1
    assert float(fits.loc[stationary, "value"].iloc[0]) == pytest.approx(2, abs=STATIONARY_SLOPE)
    assert ((fits.loc[~stationary, "value"] - 1).abs() <= FIRST_VARIATION_SLOPE).all()


def test_the_flow_is_stationary_for_moves_of_its_end_only_with_the_energy_there(frame: pd.DataFrame) -> None:
    fits = _slopes(frame)[lambda rows: rows["check"] == "free_end_variation"].set_index("control")["value"]
    assert fits["none"] == pytest.approx(2, abs=STATIONARY_SLOPE)
    assert fits["without_terminal_term"] == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)


def test_perturbing_the_functional_moves_its_minimiser_in_proportion(frame: pd.DataFrame) -> None:
    fits = _slopes(frame).set_index("check")["value"]
    assert fits["minimiser_shift"] == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)
    assert fits["minimum_change"] == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)
    assert fits["minimiser_excess"] == pytest.approx(2, abs=STATIONARY_SLOPE)


@pytest.mark.parametrize("check", ["minimiser_shift", "minimum_change", "minimiser_excess"])
def test_what_perturbation_theory_leaves_of_the_response_falls_with_epsilon(frame: pd.DataFrame, check: str) -> None:
    rows = frame[frame["check"] == f"{check}_predicted"]
    assert float(_slopes(rows)["value"].iloc[0]) == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)
    smallest = rows[rows["quantity"] == "error"].sort_values("step")["value"].iloc[0]
    assert smallest < PREDICTED_RESPONSE_RELATIVE


def test_stationary_paths_are_found_and_great_circles_exactly(frame: pd.DataFrame) -> None:
    rows = frame[frame["check"] == "stationary_path"]
    assert (rows.loc[rows["quantity"] == "converged", "value"] == 1).all()
    great = rows[rows["method"] == "great_circle"]
    assert float(great["value"].iloc[0]) < STATIONARY_DISTANCE


def test_clusters_rest_for_long_at_large_beta_and_join_at_once_under_uniform_weights(frame: pd.DataFrame) -> None:
    counts = frame[frame["check"] == "clusters"].set_index(["method", "step"])["value"]
    assert counts["beta_0", 32] == 1
    assert counts["beta_1", 32] == 1
    assert counts["beta_16", 32] > counts["beta_9", 32] > counts["beta_4", 32] > 1
    assert counts["beta_16", 256] > 2
    measured = frame[(frame["check"] == "clustering_time") & (frame["method"] == "softmax_flow")]
    times = measured.pivot_table(index="step", columns="quantity", values="value")
    assert (times["relative_error"] < CLUSTERING_TIME_COARSE).all()
    assert times.loc[8, "time"] / times.loc[7, "time"] > 2


def test_the_same_seeds_give_the_same_numbers_and_one_seed_has_no_spread() -> None:
    small = {"seeds": (5,), "tokens": 3, "dimension": 3, "horizon": 4.0, "step_sizes": (0.5, 0.25, 0.125)}
    first, again = analyze_sphere(**small), analyze_sphere(**small)
    pd.testing.assert_frame_equal(first, again)
    single = first[first["quantity"] != "slope"]
    assert single["spread"].isna().all()
    assert set(single["spread_kind"]) == {"none"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": ()}, "seeds"),
        ({"tokens": 1}, "tokens 1"),
        ({"beta": 0.0}, "beta 0"),
        ({"step_sizes": (0.5, 0.25)}, "step_sizes"),
        ({"step_sizes": (0.5, 0.25, 0.3)}, "step size 0.3"),
        ({"horizon": math.nan}, "horizon nan"),
    ],
)
def test_unusable_settings_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        analyze_sphere(**options)  # type: ignore[arg-type]


def test_fitted_slope_recovers_a_power_law_with_an_intercept_for_each_seed() -> None:
    steps = [1.0, 0.5, 0.25] * 2
    values = [3 * h**2 for h in steps[:3]] + [70 * h**2 for h in steps[3:]]
    slope, error = fit_slope(steps, values, [0] * 3 + [1] * 3)
    assert slope == pytest.approx(2, abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_fitted_slope_of_a_series_that_is_not_positive_is_nan() -> None:
    assert all(math.isnan(each) for each in fit_slope([1.0, 0.5], [1.0, 0.0], [0, 0]))
    assert all(math.isnan(each) for each in fit_slope([1.0, 0.5], [1.0, math.nan], [0, 0]))
