"""Series stay apart for colour-blind readers, in grey print, and by shape alone."""

import itertools

import numpy as np
import pytest

from attngeo.paper.figures.fig03_accuracy_cost import FAMILIES
from attngeo.paper.figures.fig07_injectivity import EXACT, NYSTROM
from attngeo.paper.style import ATTENTION, CONTROL, GRAPH_CONTROL, series_for
from tests.tolerances import SMALLEST_COLOUR_DISTANCE, SMALLEST_LIGHTNESS_STEP

# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB.
DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])


def linear_rgb(color: str) -> np.ndarray:
    """Linear RGB of "#rrggbb"."""
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear.clip(0, 1)
    scaled = xyz / np.array([0.9505, 1.0, 1.089])
    root = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("palette", [ATTENTION, CONTROL, GRAPH_CONTROL], ids=["attention", "control", "graphs"])
def test_colours_differ_with_and_without_colour_blindness_and_in_grey(palette):
    for one, two in itertools.combinations(palette.values(), 2):
        for view in (np.eye(3), DEUTERANOPIA):
            distance = np.linalg.norm(lab(view @ linear_rgb(one.color)) - lab(view @ linear_rgb(two.color)))
            assert distance > SMALLEST_COLOUR_DISTANCE, (one.label, two.label)
        lightness = abs(lab(linear_rgb(one.color))[0] - lab(linear_rgb(two.color))[0])
        assert lightness > SMALLEST_LIGHTNESS_STEP, (one.label, two.label)


@pytest.mark.parametrize(
    "palette",
    [ATTENTION, CONTROL, GRAPH_CONTROL, FAMILIES, NYSTROM],
    ids=["kinds", "controls", "graphs", "families", "forms"],
)
def test_shape_alone_tells_series_apart(palette):
    assert len({series.marker for series in palette.values()}) == len(palette)


def test_lines_without_marks_differ_in_their_dashes():
    assert len({str(series.dashes) for series in EXACT.values()}) == len(EXACT)


def test_unknown_names_take_spare_styles_in_a_stable_order():
    names = ["zeta", "laplacian", "alpha", "softmax"]
    styles = series_for(names)
    assert list(styles) == ["softmax", "laplacian", "alpha", "zeta"]
    assert styles == series_for(reversed(names))
    assert len({(series.color, series.marker) for series in styles.values()}) == 4
