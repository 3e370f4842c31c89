"""What all plots share: their style, and how a figure becomes an SVG that is the same bytes every time."""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from fedstrata.wire.foreign import visible

P = ParamSpec("P")

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without yellow: told apart by all kinds of color vision."""
NAME_LENGTH = 24
WIDTH, HEIGHT = 4.4, 3.1
"""Inches of a figure with one panel."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedstrata",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class Shown:
    """A picture of a page.

    Attributes:
        title: what it is, in a few words.
        svg: the picture; empty where there was nothing to draw.
        caption: what it shows.
        records: the figures that it was drawn from, to download.
    """

    title: str
    svg: str
    caption: str
    records: Sequence[Mapping[str, Any]] = ()


def picture(draw: Callable[P, Figure | None]) -> Callable[P, str]:
    """Make a drawing function return its figure as SVG, whatever the user's own matplotlib settings are."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        with style.context(STYLE, after_reset=True), warnings.catch_warnings():
            # The browser's fonts draw the text; what matplotlib's own font lacks does not matter.
            warnings.filterwarnings("ignore", r"Glyph \d+")
            figure = draw(*args, **kwargs)
            if figure is None:
                return ""
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        svg = visible(out.getvalue())
        # Group ids ("axes_1") would clash between the pictures of a page; nothing refers to them.
        return re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])

    return drawn


def small() -> tuple[Figure, Axes]:
    """A figure with one panel, of a phone's width: there its text is 9 pixels high or more."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    return figure, figure.add_subplot()


def whole_numbers(axes: Axes) -> None:
    """Rounds are whole: no tick between two of them."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


class PlainNumbers(LogFormatter):
    """Numbers at a log axis; the usual ones are math, which no picture here reads, as names may look like it."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The number at a tick; empty where the ticks are too close for one at each."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def short_name(name: str) -> str:
    """A name as a plot shows it: on one line, of bounded length, and never taken for a hidden one ("_x").

    A long name is cut in the middle: rows of a sweep's grid differ at the end alone.
    """
    line, half = " ".join(name.split()), NAME_LENGTH // 2
    cut = line if len(line) <= NAME_LENGTH else f"{line[: half - 1]}…{line[-half:]}"
    return f" {cut}" if cut.startswith("_") else cut
