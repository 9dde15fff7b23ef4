"""Draw runs: each row's step time, and beside it NCCL's time, exposed and hidden.

A row of panels per batch and bucket size, a column per machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.provenance import machine
from benchmarks.stream_safety.results import Result, groups
from benchmarks.stream_safety.rows import MODES, PATCHED, STOCK

# Okabe and Ito's colours, as in benchmarks.plot.
_STEP = {STOCK: ("#E69F00", "black"), PATCHED: ("#0072B2", "white")}
_EXPOSED, _HIDDEN = "NCCL, exposed", "NCCL, hidden"
_NCCL = {_EXPOSED: ("#D55E00", "black"), _HIDDEN: ("#009E73", "black")}
_WIDTH = 0.2  # of a bar, where the distance of two groups is 1


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """`runs`: as the benchmark keeps them. Raises ValueError if no row was timed."""
    columns = _by_machine(runs)
    places = list(dict.fromkeys(where for column in columns.values() for where in column))
    with pictures.canvas(picture, len(places), len(columns), sharey="row") as panels:
        for panel_row, where in zip(panels, places, strict=True):
            for panel, (name, found) in zip(panel_row, columns.items(), strict=True):
                if where not in found:
                    panel.axis("off")
                    continue
                panel.set_title(f"{name}, {where}", fontsize=10)
                panel.set_ylabel("ms per step")
                _panel(panel, found[where])
        pictures.legend(panels, [*(_step_of(mode) for mode in _STEP), *_NCCL])


def _by_machine(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Result]]]:
    """The rows of all runs on one machine, by their sizes."""
    columns: dict[str, dict[str, list[Result]]] = {}
    for run in runs:
        rows = [Result.read(row) for row in run["rows"]]
        columns.setdefault(machine(run["provenance"]), {}).update(groups(rows))
    timed = (row for column in columns.values() for group in column.values() for row in group)
    if not any(row.spread for row in timed):
        raise ValueError("no row was timed")
    return columns


def _panel(panel: Any, group: Sequence[Result]) -> None:
    names = list(dict.fromkeys(result.name for result in group))
    for result in group:
        # Of the four bars of a group: stock's step and NCCL, patched's step and NCCL.
        at = names.index(result.name) + (2 * MODES.index(result.mode) - 1.5) * _WIDTH
        _step(panel, at, result)
        _nccl(panel, at + _WIDTH, result)
    pictures.groups(panel, names)


def _step(panel: Any, at: float, result: Result) -> None:
    if result.spread is None:
        pictures.write_at_foot(panel, at, f"{result.mode}: raises", rotation="vertical")
        return
    colour, on_colour = _STEP[result.mode]
    panel.bar(at, result.spread.median, 0.9 * _WIDTH, color=colour, label=_step_of(result.mode))
    ms = f"{result.spread.median:.1f}"
    pictures.write_at_foot(panel, at, ms, on_colour, rotation="vertical")


def _nccl(panel: Any, at: float, result: Result) -> None:
    """The exposed part at the foot, which is what the step pays for."""
    if (whole := result.whole) is None:
        return
    foot = 0.0
    for name, ms in ((_EXPOSED, whole.exposed), (_HIDDEN, whole.hidden)):
        panel.bar(at, ms, 0.9 * _WIDTH, bottom=foot, color=_NCCL[name][0], label=name)
        foot += ms


def _step_of(mode: str) -> str:
    return f"{mode}, step"
