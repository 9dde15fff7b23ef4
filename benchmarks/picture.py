"""Ratios in a picture: a line for each, a dot for each round.

Text and axes are of a grey that can be read on a light and on a dark page, and the background is
left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload import Series

_GREY = "#808080"
_AGAIN = "#B0B0B0"
# Of Okabe and Ito's colours, which the colour-blind can tell apart.
_PATCHED, _STOCK = "#0072B2", "#E69F00"
_COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
_STYLE |= dict.fromkeys(_COLOURED, _GREY)


def draw(groups: Mapping[str, Sequence[Series]], path: Path) -> None:
    """`groups`: the lines of each panel, by its title. Raises ValueError if there is none."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    groups = {title: lines for title, lines in groups.items() if lines}
    if not groups:
        raise ValueError("no row was compared with another")
    heights = [len(lines) for lines in groups.values()]
    same = {"svg.hashsalt": path.stem}  # the same picture, the same file
    with pyplot.rc_context(_STYLE | same):
        figure, panels = pyplot.subplots(
            len(heights),
            1,
            figsize=(8.4, sum(0.21 * count + 0.55 for count in heights)),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        for panel, (title, lines) in zip(panels[:, 0], groups.items(), strict=True):
            _panel(panel, title, lines)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close()


def _panel(panel: Any, title: str, lines: Sequence[Series]) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    for place, line in enumerate(lines):
        colour = _PATCHED if line.patched else _STOCK
        panel.plot(line.again, [place] * len(line.again), "o", ms=3.5, color=_AGAIN, alpha=0.6)
        panel.plot(line.ratios, [place] * len(line.ratios), "o", ms=4.5, color=colour, alpha=0.6)
        words = line.note
        if line.ratios:
            middle = statistics.median(line.ratios)
            panel.plot([middle], [place], "|", ms=11, mew=2, color=colour)
            words = f"{middle:.2f}"
        at = (1.01, place)
        panel.annotate(words, at, xycoords=("axes fraction", "data"), va="center")
    panel.set_yticks(range(len(lines)), [line.name for line in lines])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    panel.axvline(1, color=_GREY, lw=1, ls="--")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
