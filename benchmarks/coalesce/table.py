"""Results as Markdown: a table of times and one of what is sent and held, per N and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.coalesce.measure import Result, native_of, ratios
from benchmarks.coalesce.modes import PHASES
from benchmarks.tables import by_round, cell, markdown, middle, number
from benchmarks.timing import Spread, median_phases

_TIMES = (
    "row",
    "native's ms per step",
    "/ native",
    "by round",
    f"host ms: {', '.join(PHASES)}",
    "gradient error",
    "parameter error",
)
_SENT = (
    "row",
    "collectives",
    "MiB sent in reductions",
    "MiB sent in all",
    "MiB in the window",
    "peak MiB",
)


def tables(results: Sequence[Result]) -> Iterator[str]:
    for title, group in _groups(results):
        yield markdown((title, *_TIMES), [_times(one, results) for one in group])
        yield markdown((f"{title}: wire and memory", *_SENT), [_sent(one) for one in group])


def _groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for backwards, batch in dict.fromkeys((one.backwards, one.batch) for one in results):
        group = [one for one in results if (one.backwards, one.batch) == (backwards, batch)]
        yield f"N={backwards}, batch {batch}", group


def _times(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    base = native_of(results, result)
    alone = base is None or base is result  # the floor, too
    found = [] if alone else ratios(result, base)
    timed = number(Spread.of(result.totals).median, 2) if result.times and alone else "-"
    return (
        _stage(result),
        result.mode,
        cell(result.error) if result.error else timed,
        middle(found),
        by_round(found),
        _host(result),
        _error(result.gradient_error),
        _error(result.parameter_error),
    )


def _sent(result: Result) -> tuple[str, ...]:
    measured = bool(result.sent)
    return (
        _stage(result),
        result.mode,
        _collectives(result) or "-",
        number(result.sent_mib(reductions=True), 2) if measured else "-",
        number(result.sent_mib(reductions=False), 2) if measured else "-",
        number(result.window_mib, 0),
        number(result.peak_mib, 0),
    )


def _collectives(result: Result) -> str:
    """The kernels that ran; where the calls are another number, as in a group, those as well."""
    calls = Counter(one.kind for one in result.sent)
    return ", ".join(
        f"{kind} {count}" + ("" if calls[kind] == count else f" ({calls[kind]} calls)")
        for kind, count in sorted(result.collectives.items())
    )


def _host(result: Result) -> str:
    if not result.times:
        return "-"
    phases = median_phases([step.host for step in result.steps])
    return ", ".join(number(phases.get(phase), 2) for phase in PHASES)


def _stage(result: Result) -> str:
    return "-" if result.stage is None else f"Z{result.stage}"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
