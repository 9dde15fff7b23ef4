"""Panels of bars, in a file: what the plots of the benchmarks share.

Text and lines are of a grey that can be read on a light and on a dark page, and the background is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Of a bar, and what can be read on it.
Colours = tuple[str, str]

_GREY = "#808080"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY
    ),
}


@contextmanager
def stack(picture: Path, lines: Sequence[int]) -> Iterator[Any]:
    """Panels one below the other, each as high as its lines; they share the axis below."""
    with _figure(picture) as pyplot:
        figure, panels = pyplot.subplots(
            len(lines),
            1,
            figsize=(8.4, sum(0.21 * count + 0.55 for count in lines)),
            height_ratios=lines,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        yield panels[:, 0]
        _save(figure, picture)


@contextmanager
def canvas(picture: Path, rows: int, columns: int, sharey: bool | str = True) -> Iterator[Any]:
    """Panels to draw on, as an array; saved as `picture` afterwards."""
    with _figure(picture) as pyplot:
        figure, panels = pyplot.subplots(
            rows,
            columns,
            figsize=(0.6 + 4.6 * columns, 0.8 + 2.6 * rows),
            sharey=sharey,
            squeeze=False,
            layout="constrained",
        )
        yield panels
        _save(figure, picture)


@contextmanager
def _figure(picture: Path) -> Iterator[Any]:
    """pyplot, in the style of the pages."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    same = {"svg.hashsalt": picture.stem}  # the same picture, the same file
    with pyplot.rc_context(_STYLE | same):
        yield pyplot
        pyplot.close()


def _save(figure: Any, picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, transparent=True, metadata={"Date": None})


def bar(
    panel: Any,
    at: float,
    spread: tuple[float, float, float],
    width: float,
    name: str,
    colours: Colours,
    **looks: Any,
) -> None:
    """`spread`: where the bar ends, and the ends of its error bar."""
    middle, low, high = spread
    colour, on_colour = colours
    panel.bar(at, middle, 0.9 * width, color=colour, label=name, **looks)
    panel.errorbar(at, middle, [[middle - low], [high - middle]], color=_GREY, lw=1)
    write_at_foot(panel, at, f"{middle:.2f}", on_colour)


def write_at_foot(panel: Any, at: float, text: str, colour: str = _GREY, **looks: Any) -> None:
    """At the foot of a bar, where the line at 1 does not cross it."""
    panel.annotate(
        text,
        (at, 0),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=colour,
        **looks,
    )


def line_at_one(panel: Any, name: str) -> None:
    """What the bars are compared with."""
    panel.axhline(1, color=_GREY, lw=1, ls="--")
    panel.annotate(
        name,
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def groups(panel: Any, names: Sequence[str]) -> None:
    """Of bars, around 0, 1, 2 ..."""
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.tick_params(axis="x", length=0)
    panel.margins(y=0.05)
    panel.spines[["top", "right"]].set_visible(False)


def legend(panels: Any, order: Iterable[str]) -> None:
    """One for all panels, of those names that any has."""
    named = {
        name: mark
        for panel in panels.flat
        for mark, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    shown = [name for name in order if name in named]
    lines = math.ceil(len(shown) / (3 * panels.shape[1]))  # of as many as fit below the panels
    panels.flat[0].figure.legend(
        [named[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=math.ceil(len(shown) / lines),
        frameon=False,
        fontsize=9,
    )
