"""An 8-billion-parameter shape in small memory: the weights' analysis never holds two layers and a gigabyte more."""

from pathlib import Path

import pytest

from benchmarks import large_checkpoint


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_weights_of_an_8b_shape_are_measured_within_two_layers_and_a_gigabyte(tmp_path: Path) -> None:
    found = large_checkpoint.measure((4, 8), tmp_path)
    assert not list(tmp_path.iterdir())
    goal = 2 * found[0]["bytes_of_layer"] + large_checkpoint.GOAL_BEYOND
    for told in found:
        assert told["peak_bytes"] <= goal, told
    assert large_checkpoint.extrapolated(found[0], found[1], "peak_bytes") <= goal
