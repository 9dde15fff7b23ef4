"""A run as Markdown, from what it kept: times, memory and compilations, training, bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from benchmarks.dc_fallback.bars import bars
from benchmarks.dc_fallback.results import Difference, Row, find, ratios
from benchmarks.dc_fallback.rows import EAGER, STOCK
from benchmarks.provenance import sentence
from benchmarks.tables import bars_table, cell, markdown, middle, number, over, rounds
from benchmarks.timing import Spread

_LOSSES = 6
_NAMES = 3
_LENGTH = 160  # of an error


def section(run: Mapping[str, Any]) -> str:
    """`run`: what the benchmark keeps as JSON."""
    rows = [Row.read(row) for row in run["rows"]]
    parts = (_origin(run), _times(rows), _memory(rows), _training(rows))
    return "\n\n".join((*parts, bars_table("ratio", bars(rows))))


def _origin(run: Mapping[str, Any]) -> str:
    options = run["options"]
    return (
        f"{sentence(run['provenance'])} "
        f"{options['layers']} x Linear({options['width']}), {options['words']} words, "
        f"{options['batch']} x {options['tokens']} tokens per rank; {rounds(options['rounds'])} of "
        f"{options['steps']} timed steps after {options['warmup']}."
    )


def _times(rows: Sequence[Row]) -> str:
    header = (
        "skipped",
        "mode",
        "eager's ms per step",
        "/ eager",
        "/ stock",
        "ms: forward, backward, step",
        "trains",
    )
    return markdown(header, (_times_of(row, rows) for row in rows))


def _times_of(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    spread = row.ms if row.mode == EAGER else None
    return (
        row.skipped,
        row.mode,
        cell(row.error)[:_LENGTH] if row.error else number(spread.median if spread else None, 2),
        *(_ratio(row, find(rows, base, row.skipped)) for base in (EAGER, STOCK)),
        _phases(row),
        _trains(row),
    )


def _memory(rows: Sequence[Row]) -> str:
    header = (
        "skipped",
        "mode",
        "peak MiB",
        "/ eager",
        "of forward and backward",
        "/ eager",
        "from the first step on",
        "/ eager",
        "graphs",
        "frames",
        "graph breaks",
        "graphs compiled later",
    )
    return markdown(header, (_memory_of(row, rows) for row in rows if not row.error))


def _memory_of(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    eager = find(rows, EAGER, row.skipped)
    counted = [one.compilations for one in row.rounds if one.compilations]
    mib: list[str] = []
    for own, base in zip(_mib(row), _mib(eager), strict=True):
        mib += [number(own, 0), number(over(own, base), 3)]
    return (
        row.skipped,
        row.mode,
        *mib,
        _several(one.graphs for one in counted),
        _several(one.frames for one in counted),
        _several(one.graph_breaks for one in counted),
        _several(one.recompilations for one in row.rounds),
    )


def _mib(row: Row | None) -> tuple[float | None, float | None, float | None]:
    if row is None or row.peak is None or row.peak_from_the_first is None:
        return None, None, None
    return row.peak.whole, row.peak.backward, row.peak_from_the_first.whole


def _training(rows: Sequence[Row]) -> str:
    header = (
        "skipped",
        "mode",
        f"loss of the first {_LOSSES} steps",
        "update norm off by",
        "update off by",
        "gradients off by",
        "not trained as in eager",
    )
    return markdown(header, (_training_of(row) for row in rows if not row.error))


def _training_of(row: Row) -> tuple[str, ...]:
    found = row.differences
    worst = (
        ["-"] * len(fields(Difference))
        if found is None
        else [f"{value:.1e}" for value in astuple(Difference.worst(found.values()))]
    )
    losses = row.rounds[0].losses[:_LOSSES]
    return (
        row.skipped,
        row.mode,
        " ".join(f"{loss:.4f}" for loss in losses) or "-",
        *worst,
        _names(row.untrained) if found else "-",
    )


def _trains(row: Row) -> str:
    if row.error:
        return "-"
    if row.differences is None:
        return "reference" if row.mode == EAGER else "not compared"
    lost, all_of_them = len(row.untrained), len(row.differences)
    return f"NO: not {lost} of {all_of_them} parameters" if lost else "yes"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES])
    more = len(names) - _NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def _ratio(row: Row, base: Row | None) -> str:
    return "-" if row is base else middle(ratios(row, base))


def _phases(row: Row) -> str:
    """Each phase's median of the rounds."""
    blocks = [one.ms_by_phase for one in row.rounds if one.ms_by_phase]
    if not blocks:
        return "-"
    return ", ".join(f"{Spread.of([b[name] for b in blocks]).median:.2f}" for name in blocks[0])


def _several(counts: Iterable[int]) -> str:
    """One number where all rounds agree."""
    return ", ".join(map(str, sorted(set(counts)))) or "-"
