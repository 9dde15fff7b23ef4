"""A run as Markdown, from what it kept: times and numbers, what NCCL's time was hidden, bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.provenance import p2p, sentence
from benchmarks.stream_safety.agreement import Agreement
from benchmarks.stream_safety.bars import bars
from benchmarks.stream_safety.results import Result, groups, ratios, stock_of
from benchmarks.stream_safety.rows import PHASES
from benchmarks.tables import bars_table, by_round, cell, markdown, middle, number, over, rounds

_TIMES = (
    "mode",
    "stock's ms per step",
    "/ stock",
    "by round",
    f"ms: {', '.join(PHASES)}",
    "peak MiB",
    "gradient error",
    "gradients as without overlap",
    "end as without overlap",
)
_TRACE = (
    "mode",
    "traced ms",
    "NCCL ms",
    "hidden",
    "exposed",
    "hidden part",
    "backward: traced ms",
    "NCCL ms",
    "hidden",
    "exposed",
    "compute stream idle",
)
_LENGTH = 160  # of an error


def section(run: Mapping[str, Any]) -> str:
    """`run`: what the benchmark keeps as JSON."""
    results = [Result.read(row) for row in run["rows"]]
    ends = bars_table("against stock, against overlap off", bars(results, p2p(run["provenance"])))
    return "\n\n".join((_origin(run), *_tables(results), ends))


def _origin(run: Mapping[str, Any]) -> str:
    options = run["options"]
    width, wide = options["width"], 4 * options["width"]
    return (
        f"{sentence(run['provenance'])} "
        f"{options['layers']} layers: RMSNorm, four Linear({width}), RMSNorm, "
        f"Linear({width}, {wide}), Linear({wide}, {width}), and again; "
        f"{rounds(options['rounds'])} of {options['steps']} timed steps after {options['warmup']}."
    )


def _tables(results: Sequence[Result]) -> Iterator[str]:
    for where, group in groups(results):
        yield f"#### {where[0].upper()}{where[1:]}"
        yield markdown(("row", *_TIMES), [_times(one, results) for one in group])
        if traced := [one for one in group if one.trace]:
            yield "Traced:"
            yield markdown(("row", *_TRACE), map(_trace, traced))


def _times(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    base = stock_of(results, result)
    found = [] if base is result else ratios(result, base)
    raised = cell(result.error)[:_LENGTH] if result.error else "-"
    return (
        result.name,
        result.mode,
        number(result.spread.median, 2) if result.spread and base is result else raised,
        middle(found),
        by_round(found),
        ", ".join(number(result.phases.get(name), 2) for name in PHASES) if result.spread else "-",
        number(result.peak_mib, 0),
        "-" if result.gradient_error is None else f"{result.gradient_error:.1e}",
        _agreement(result.gradients),
        _agreement(result.end),
    )


def _trace(result: Result) -> tuple[str, ...]:
    whole, backward = result.whole, (result.trace or {}).get("backward")
    assert whole is not None
    assert backward is not None
    part = over(whole.hidden, whole.nccl)
    numbers = (
        *(whole.ms, whole.nccl, whole.hidden, whole.exposed),
        *(backward.ms, backward.nccl, backward.hidden, backward.exposed, backward.idle),
    )
    texts = [number(value, 2) for value in numbers]
    texts.insert(4, "-" if part is None else f"{100 * part:.0f} %")
    return result.name, result.mode, *texts


def _agreement(found: Agreement | None) -> str:
    if found is None:
        return "-"
    if not found.differing:
        return "equal"
    return f"NO: {found.differing} of {found.of}, off by {found.error:.1e}"
