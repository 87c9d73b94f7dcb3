"""One look for every figure: sizes of a conference page, series told apart by colour, marker, line and lightness."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

FONT = "STIXGeneral"
RASTERISE_ABOVE = 2000
LETTERS_ACROSS = 78  # of panel titles, over the width of the figure
_HASH_SALT = "attngeo"


@dataclass(frozen=True)
class Series:
    """How one series is drawn; `dashes` is a line style that matplotlib understands."""

    label: str
    color: str
    marker: str
    dashes: Any

    def line(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot`."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.dashes, "label": self.label} | changes

    def points(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot` without a line."""
        return self.line(linestyle="none") | changes


# Hues of Okabe and Ito, moved apart in lightness so that grey print and colour-blind readers keep the order.
ATTENTION = {
    "softmax": Series("softmax", "#000000", "o", "-"),
    "gaussian": Series("Gaussian", "#0B4F9E", "s", (0, (4, 1.5))),
    "laplacian": Series("Laplacian", "#D55E00", "^", "-"),
    "riemannian": Series("Riemannian", "#3DB0A0", "D", (0, (4, 1.2, 1, 1.2))),
    "softmax_sr": Series("softmax, spatial reduction", "#E6B800", "v", (0, (1, 1.2))),
}
CONTROL = {
    "trained": Series("trained", "#D55E00", "o", "-"),
    # Drawn beside attention kinds too, so its marker is none of theirs.
    "null": Series("shape-matched null", "#9C9C9C", "X", (0, (4, 1.5))),
    "random_init": Series("random init", "#0B4F9E", "^", (0, (1, 1.2))),
    "excess": Series("excess over null", "#000000", "D", "-"),
}
GRAPH_CONTROL = {
    "depth_shuffled": Series("depth shuffled", "#9C9C9C", "s", (0, (4, 1.5))),
    "random_init": CONTROL["random_init"],
    "shuffled_tokens": Series("shuffled tokens", "#E6B800", "D", (0, (4, 1.2, 1, 1.2))),
    "uniform_attention": Series("uniform attention", "#000000", "v", (0, (1, 1.2))),
    "trained": CONTROL["trained"],
}
_SPARE = (
    ("#000000", "o", "-"),
    ("#D55E00", "^", (0, (4, 1.5))),
    ("#0B4F9E", "s", (0, (4, 1.2, 1, 1.2))),
    ("#3DB0A0", "D", (0, (1, 1.2))),
    ("#E6B800", "v", "-"),
    ("#8C4A7D", "P", (0, (4, 1.5))),
    ("#A9B8CC", "X", (0, (1, 1.2))),
)


def series_for(names: Iterable[str], known: dict[str, Series] | None = None) -> dict[str, Series]:
    """A series for each name, in the known names' order and then sorted; unknown names take spare styles in turn."""
    known = ATTENTION if known is None else known
    wanted = set(names)
    chosen = {name: series for name, series in known.items() if name in wanted}
    taken = {(series.color, series.marker) for series in chosen.values()}
    spare = [style for style in _SPARE if style[:2] not in taken] or list(_SPARE)
    for index, name in enumerate(sorted(wanted - set(known))):
        color, marker, dashes = spare[index % len(spare)]
        chosen[name] = Series(name, color, marker, dashes)
    return chosen


def _settings() -> dict[str, Any]:
    from tueplots import axes, fontsizes

    return {
        **fontsizes.iclr2024(default_smaller=1),
        **axes.lines(),
        # Fonts that matplotlib carries itself: the same letters on a machine without LaTeX or system fonts.
        "font.family": FONT,
        "mathtext.fontset": "stix",
        "text.usetex": False,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": _HASH_SALT,
        "savefig.dpi": 220,
        "savefig.pad_inches": 0.02,
        "lines.markersize": 3.2,
        "lines.markeredgewidth": 0.4,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.4,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "legend.columnspacing": 1.2,
        "axes.formatter.use_mathtext": True,
        "path.simplify": True,
    }


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw and save in the paper's look, whatever matplotlibrc, MPLBACKEND or the caller has set."""
    # The backend is left alone: these figures never use pyplot, and a bad MPLBACKEND must not stop them.
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context(rc=cast(Any, {**defaults, **_settings()})):
        yield


def _after(spelled: Callable[[str], str], words: Callable[..., str], *of_tick: Any) -> str:
    return spelled(words(*of_tick))


def spell_out(figure: "Figure") -> None:
    """Give letters that the font lacks their code, as tables do: drawn, all of them would be the same empty box."""
    from matplotlib.cbook import is_math_text
    from matplotlib.font_manager import findfont, get_font
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    letters = get_font(findfont(FONT)).get_charmap().keys() | {ord("\n")}

    def spelled(words: str) -> str:
        if words.isascii() or is_math_text(words):
            return words
        return "".join(letter if ord(letter) in letters else f"(U+{ord(letter):04X})" for letter in words)

    # Formatters write the labels of their ticks anew whenever these are drawn.
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FixedFormatter):
            formatter.seq = [spelled(words) for words in formatter.seq]
        elif isinstance(formatter, FuncFormatter):
            formatter.func = partial(_after, spelled, formatter.func)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (words := spelled(text.get_text())) != text.get_text():
            text.set_text(words)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorate a draw function so that it runs in `paper_style`."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with paper_style():
            return draw(*args, **kwargs)

    return inside


def new_figure(rows: int = 1, columns: int = 1, *, height_to_width: float = 0.72) -> "tuple[Figure, list[list[Axes]]]":
    """A figure across the text width (5.5 in) with rows x columns axes; made without pyplot, so without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from tueplots import figsizes

    size = figsizes.iclr2024(nrows=rows, ncols=columns, height_to_width_ratio=height_to_width)["figure.figsize"]
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def legend_below(figure: "Figure", axes: "Iterable[Axes]", *, columns: int = 4) -> None:
    """One legend under all panels, each label once, in the order of first appearance."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=min(columns, len(handles))
        )


def panel_title(axis: "Axes", index: int, text: str, columns: int = 1) -> None:
    """Left-aligned title "(a) text", wrapped to what fits over one of so many columns."""
    axis.set_title(f"({chr(ord('a') + index)}) {wrapped(text, max(8, LETTERS_ACROSS // columns - 4))}", loc="left")


def share_scale(axes: "Iterable[Axes]") -> None:
    """The same vertical limits for panels that are compared."""
    axes = list(axes)
    if not axes:
        return
    limits = [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    room = 0.04 * (high - low)  # so that marks at the edge stay whole
    for axis in axes:
        axis.set_ylim(low - room, high + room)


def name_point(axis: "Axes", x: float, y: float, text: str, color: str) -> None:
    """A small name to the upper right of a point; none for a point that cannot be drawn."""
    if math.isfinite(x) and math.isfinite(y):
        axis.annotate(text, (x, y), xytext=(2, 2), textcoords="offset points", fontsize="x-small", color=color)


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width` letters: broken before "@", else after " " or "-", in a word only if need be."""
    if len(text) <= width:
        return text
    if "@" in text[1:]:
        name, precision = text.rsplit("@", 1)
        return f"{wrapped(name, width)}\n{wrapped(f'@{precision}', width)}"
    lines = [""]
    for piece in re.findall(rf"[^- ]{{1,{width - 1}}}[- ]?|[- ]", text):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def scatter_points(axis: "Axes", x: Any, y: Any, **style: Any) -> None:
    """Plot points; above `RASTERISE_ABOVE` of them they become pixels while axes and text stay vectors."""
    axis.plot(x, y, linestyle="none", rasterized=len(x) > RASTERISE_ABOVE, **style)
