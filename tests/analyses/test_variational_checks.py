"""The analysis of claims P1.a-c: orders come out as derived, and every control fails as it must."""

import math

import pandas as pd
import pytest

from attngeo.errors import UserError
from attngeo.variational import analyze_sphere, checks
from attngeo.variational.checks import COLUMNS, fit_slope
from tests.tolerances import (
    FIRST_VARIATION_SLOPE,
    FITTED_ORDER,
    FLAT_SLOPE,
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
    ["integrator_order", "energy_dissipation", "energy_dissipation_path", "euler_lagrange", "step_local_error"],
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


@pytest.mark.parametrize("check", ["energy_dissipation", "energy_dissipation_path", "euler_lagrange", "minimiser"])
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


def test_perturbing_the_functional_moves_its_minimiser_in_proportion(frame: pd.DataFrame) -> None:
    fits = _slopes(frame).set_index("check")["value"]
    assert fits["minimiser_shift"] == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)
    assert fits["minimum_change"] == pytest.approx(1, abs=FIRST_VARIATION_SLOPE)
    assert fits["minimiser_excess"] == pytest.approx(2, abs=STATIONARY_SLOPE)


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
