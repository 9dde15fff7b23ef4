"""Results as Markdown: the rows, where a step's time goes, and the bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.retain.measure import Result
from benchmarks.tables import Bar, by_round, cell, markdown, middle, number, over
from benchmarks.timing import Spread

RESIDENT_BAR, IDLE_BAR, STEP_BAR = 1.02, 1.01, 1.20
ORDINARY, IDLE, _RETAINED = 1, 2, 4
_HOLDING = (10, 9)
_SEVERAL_BACKWARDS = (4, 5, 6, 7)


def ratios(results: Mapping[int, Result], row: int, over: int) -> list[float]:
    """One row's median over another's, round by round; empty if either was not timed."""
    ours, theirs = results.get(row), results.get(over)
    if ours is None or theirs is None:
        return []
    pairs = zip(ours.by_round, theirs.by_round, strict=False)
    return [one / other for one, other in pairs]


def bars(results: Mapping[int, Result]) -> list[Bar]:
    """The bars that zero3_retain has to stay under, each against stock's ordinary step."""
    strict = _resident(results, like_with_like=False)
    alike = _resident(results, like_with_like=True)
    return [
        Bar("resident after each backward", max(strict, default=None), RESIDENT_BAR),
        Bar("the same, kept graphs against a kept graph", max(alike, default=None), RESIDENT_BAR),
        Bar.of_rounds(
            "idle cost: patched ordinary step", ratios(results, IDLE, ORDINARY), IDLE_BAR
        ),
        Bar.of_rounds("step with K=2", ratios(results, _RETAINED, ORDINARY), STEP_BAR),
        Bar.of_rounds("stock, all persistent: K=2 over K=1", ratios(results, *_HOLDING), None),
    ]


def rows(results: Mapping[int, Result]) -> str:
    """Each row over row 1, or over the other reference, with which it shares an engine."""
    header = (
        "#",
        "row",
        "reference's ms per step",
        "/ reference",
        "by round",
        "MiB after each backward",
        "peak MiB",
        "gathered after each backward",
        "gradient error",
        "all-gathers, reduce-scatters",
    )
    return markdown(header, [_row(results[number], results) for number in sorted(results)])


def phases(results: Iterable[Result]) -> str:
    """Medians of the phases, ms, of each row that was timed."""
    body = [
        (str(result.number), ", ".join(f"{name} {ms:.2f}" for name, ms in result.phases.items()))
        for result in sorted(results, key=lambda result: result.number)
        if result.times
    ]
    return markdown(("#", "ms per phase"), body)


def _resident(results: Mapping[int, Result], *, like_with_like: bool) -> list[float]:
    """MiB after each backward of the rows with several, over those after an ordinary one.

    like_with_like: a backward that keeps its graph against an ordinary one that keeps it. Else
    against one that frees it; the activations that any kept graph holds then count as ours.
    """
    ordinary = results.get(ORDINARY)
    if ordinary is None or not (ordinary.held and ordinary.held_graph_kept):
        return []
    freed, kept = ordinary.held[-1].mib, ordinary.held_graph_kept[-1].mib
    ratios = []
    for row in _SEVERAL_BACKWARDS:
        held = results[row].held if row in results else []
        for one in held:
            keeps_graph = one is not held[-1]
            ratios.append(over(one.mib, kept if keeps_graph and like_with_like else freed))
    return [ratio for ratio in ratios if ratio is not None]


def _row(result: Result, results: Mapping[int, Result]) -> tuple[str, ...]:
    retained, persistent = _HOLDING
    reference = persistent if result.number in (retained, persistent) else ORDINARY
    alone = result.number == reference
    found = [] if alone else ratios(results, result.number, reference)
    timed = number(Spread.of(result.totals).median, 2) if result.times and alone else "-"
    counts = result.collectives
    return (
        str(result.number),
        result.title,
        cell(result.error) if result.error else timed,
        middle(found),
        by_round(found),
        ", ".join(number(held.mib, 0) for held in result.held) or "-",
        number(result.peak_mib, 0),
        ", ".join(str(held.available) for held in result.held) or "-",
        "-" if result.gradient_error is None else f"{result.gradient_error:.1e}",
        f"{counts['all_gather']}, {counts['reduce_scatter']}" if counts else "-",
    )
