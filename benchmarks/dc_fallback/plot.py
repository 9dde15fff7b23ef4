"""Draw runs: step time and peak memory over eager ZeRO-3's, by how much Dynamo skips.

A column per run. What raised, or trains less than eager does, says so in the place of its bar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.dc_fallback.results import Row, find, ratios
from benchmarks.dc_fallback.rows import EAGER, PATCHED, SKIPPED, STOCK
from benchmarks.tables import over
from benchmarks.timing import Spread

# Okabe and Ito's colours, as in benchmarks.plot.
_COLOURS = {STOCK: ("#E69F00", "black"), PATCHED: ("#0072B2", "white")}
_UNTRAINED = "does not train"
_WIDTH = 0.35  # of a bar, where the distance of two groups is 1

_Ratio = Callable[[Row, Row], tuple[float, float, float] | None]


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """`runs`: as the benchmark keeps them. Raises ValueError if none was compared with eager."""
    read = [[Row.read(row) for row in run["rows"]] for run in runs]
    if not any(_shown(rows) for rows in read):
        raise ValueError("no step was compared with eager ZeRO-3")
    measures = {"step time / eager": _step, "peak memory / eager": _peak}
    with pictures.canvas(picture, len(measures), len(runs), sharey="row") as panels:
        for panel_row, (name, ratio) in zip(panels, measures.items(), strict=True):
            for panel, run, rows in zip(panel_row, runs, read, strict=True):
                panel.set_title(f"DeepSpeed {run['provenance']['deepspeed']}", fontsize=10)
                _panel(panel, rows, ratio)
            panel_row[0].set_ylabel(name)
        pictures.legend(panels, _COLOURS)


def _panel(panel: Any, rows: Sequence[Row], ratio: _Ratio) -> None:
    shown = _shown(rows)
    skipped = [one for one in SKIPPED if any(row.skipped == one for row in shown)]
    for row in shown:
        mode = list(_COLOURS).index(row.mode)
        at = skipped.index(row.skipped) + (mode - (len(_COLOURS) - 1) / 2) * _WIDTH
        eager = find(rows, EAGER, row.skipped)
        found = None if eager is None or row.error else ratio(row, eager)
        if found is None:
            _instead(panel, at, f"{row.mode}: raises" if row.error else f"{row.mode}: no number")
        elif row.untrained:
            _instead(panel, at, f"{row.mode}: {_UNTRAINED}")
        else:
            pictures.bar(panel, at, found, _WIDTH, row.mode, _COLOURS[row.mode])
    pictures.line_at_one(panel, "eager")
    pictures.groups(panel, [f"{one} skipped" for one in skipped])


def _instead(panel: Any, at: float, text: str) -> None:
    """Of a bar: a time of a step that does not train is no time of a step."""
    pictures.write_at_foot(panel, at, text, rotation="vertical")


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Those that can be held against eager."""
    return [row for row in rows if row.mode in _COLOURS and find(rows, EAGER, row.skipped)]


def _step(row: Row, eager: Row) -> tuple[float, float, float] | None:
    by_round = ratios(row, eager)
    if not by_round:
        return None
    spread = Spread.of(by_round)
    return spread.median, spread.low, spread.high


def _peak(row: Row, eager: Row) -> tuple[float, float, float] | None:
    ratio = over(*(one.peak.whole if one.peak else None for one in (row, eager)))
    return None if ratio is None else (ratio, ratio, ratio)
