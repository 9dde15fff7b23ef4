"""The bars that the patch has to stay under, as ratios in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.dc_fallback.results import Peak, Row, find, ratios
from benchmarks.dc_fallback.rows import ALL, EAGER, HALF, NOTHING, PATCHED, STOCK
from benchmarks.tables import Bar, over

_IDLE, _HALF, _PEAK, _COMPILATIONS = 1.01, 1.0, 1.10, 1.0


def bars(rows: Sequence[Row]) -> list[Bar]:
    def step(name: str, mode: str, base: str, skipped: str, bar: float | None) -> Bar:
        by_round = ratios(find(rows, mode, skipped), find(rows, base, skipped))
        return Bar.of_rounds(f"step, {skipped} skipped: {name}", by_round, bar)

    def peak(name: str, of: Callable[[Row], float | None]) -> Bar:
        both = [_of(find(rows, mode, ALL), of) for mode in (PATCHED, EAGER)]
        return Bar(f"{name}, all skipped: patched / eager", over(*both), _PEAK)

    return [
        step("patched / stock", PATCHED, STOCK, NOTHING, _IDLE),
        step("patched / eager", PATCHED, EAGER, HALF, _HALF),
        step("patched / eager", PATCHED, EAGER, ALL, None),
        peak("peak", lambda row: _whole(row.peak)),
        peak("peak of forward and backward", lambda row: _backward(row.peak)),
        peak("peak from the first step on", lambda row: _whole(row.peak_from_the_first)),
        *(
            Bar(
                f"compilations, {skipped} skipped: patched / stock",
                over(*(_of(find(rows, mode, skipped), _graphs) for mode in (PATCHED, STOCK))),
                _COMPILATIONS,
            )
            for skipped in (NOTHING, HALF)
        ),
    ]


def _of(row: Row | None, value: Callable[[Row], float | None]) -> float | None:
    """Of a row that ran to its end."""
    return None if row is None or row.error is not None else value(row)


def _whole(peak: Peak | None) -> float | None:
    return None if peak is None else peak.whole


def _backward(peak: Peak | None) -> float | None:
    return None if peak is None else peak.backward


def _graphs(row: Row) -> float | None:
    """Of the round with the most."""
    counted = [
        one.compilations.graphs + one.recompilations for one in row.rounds if one.compilations
    ]
    return max(counted, default=None)
