"""Bootstrap intervals cover what they promise, and many tests together err as seldom as one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attngeo import intervals
from tests.tolerances import BOOTSTRAP_AGAINST_SCIPY, BOOTSTRAP_COVERAGE, BOOTSTRAP_EQUIVARIANCE


@pytest.mark.parametrize(("law", "size"), [("normal", 6), ("normal", 8), ("normal", 32), ("exponential", 32)])
def test_intervals_cover_the_mean_of_a_known_distribution_as_often_as_they_say(law: str, size: int) -> None:
    draw = np.random.default_rng(0)
    samples = torch.from_numpy(getattr(draw, law)(size=(2000, size)))
    truth = {"normal": 0.0, "exponential": 1.0}[law]
    low, high = intervals.mean_intervals(samples)
    covered = ((low <= truth) & (truth <= high)).double().mean().item()
    assert covered == pytest.approx(0.95, abs=BOOTSTRAP_COVERAGE)
    assert bool((low < high).all())


def test_intervals_of_a_difference_cover_it_too() -> None:
    draw = np.random.default_rng(1)
    heads, null = draw.normal(1.0, 1.0, (2000, 12)), draw.normal(0.5, 2.0, (2000, 16))
    low, high = intervals.mean_intervals(torch.from_numpy(heads), torch.from_numpy(null))
    truth = 0.5
    covered = ((low <= truth) & (truth <= high)).double().mean().item()
    assert covered == pytest.approx(0.95, abs=BOOTSTRAP_COVERAGE)


def test_the_interval_of_many_values_is_that_of_scipy() -> None:
    sample = np.random.default_rng(2).exponential(size=203)
    expected = stats.bootstrap(
        (sample,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    width = expected.high - expected.low
    assert intervals.mean_interval(sample) == pytest.approx(
        (expected.low, expected.high), abs=BOOTSTRAP_AGAINST_SCIPY * width
    )


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.floats(-10, 10), min_size=intervals.FEWEST, max_size=17), st.floats(0.1, 10), st.floats(-10, 10))
def test_a_scaled_and_shifted_sample_has_the_scaled_and_shifted_interval(
    sample: list[float], scale: float, shift: float
) -> None:
    moved = intervals.mean_interval(scale * torch.tensor(sample, dtype=torch.float64) + shift)
    expected = [scale * end + shift for end in intervals.mean_interval(sample)]
    assert moved == pytest.approx(expected, abs=BOOTSTRAP_EQUIVARIANCE)
    assert intervals.mean_interval(sample) == intervals.mean_interval(sample)


def test_too_few_values_a_nan_and_no_spread_have_the_interval_that_they_can() -> None:
    assert all(map(math.isnan, intervals.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])))
    assert all(map(math.isnan, intervals.mean_interval(torch.rand(9), torch.rand(5))))
    assert all(map(math.isnan, intervals.mean_interval([1.0, 2.0, math.nan, 4.0, 5.0, 6.0])))
    assert intervals.mean_interval([0.25] * 8) == pytest.approx((0.25, 0.25))


def test_an_interval_over_draws_and_windows_covers_the_mean_and_needs_six_windows() -> None:
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    low, high = intervals.mean_interval_of_grid(values)
    assert low < values.mean() < high
    # Draws of one window differ as windows do here, so that both resamplings count: 1 / 3 + 1 / 40 + 1 / 120 at most.
    assert 0.1 < high - low < 4 * math.sqrt(1 / 3 + 1 / 40 + 1 / 120)
    assert all(map(math.isnan, intervals.mean_interval_of_grid(values[:, :5])))
    assert all(map(math.isnan, intervals.mean_interval_of_grid(values * math.nan)))


def test_holm_adjusts_as_published_and_leaves_out_what_could_not_be_tested() -> None:
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = intervals.holm([0.02, math.nan, 0.04])
    assert adjusted[0] == adjusted[2] == pytest.approx(0.04)
    assert math.isnan(adjusted[1])
    assert intervals.holm([0.9, 0.8]) == [1.0, 1.0]
    assert intervals.holm([]) == []


def test_without_any_effect_holm_rejects_in_one_family_of_twenty() -> None:
    p_values = np.random.default_rng(3).random((4000, 30))
    wrong = np.mean([min(intervals.holm(list(row))) < 0.05 for row in p_values])
    assert wrong == pytest.approx(0.05, abs=BOOTSTRAP_COVERAGE)
