"""The bars that the patch has to stay under, as ratios to native in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.coalesce.measure import Result, find, native_of, ratios
from benchmarks.coalesce.modes import GATHER_ONCE, OURS
from benchmarks.tables import Bar, over

AT = 4  # backwards
_BYTES, _DEFAULT, _MEMORY = 0.5, 1.0, 1.0
# With and without peer-to-peer copies between the GPUs.
_GATHERED_ONCE = {True: 0.75, False: 0.65}


def bars(results: Sequence[Result], batches: Sequence[int], p2p: bool) -> list[Bar]:
    """Of the rows with four backwards. `p2p`: whether GPUs copy directly between each other."""
    return [bar for batch in batches for bar in _of_batch(results, batch, p2p)]


def _of_batch(results: Sequence[Result], batch: int, p2p: bool) -> Iterator[Bar]:
    def row(stage: int, mode: str) -> Result | None:
        return find(results, stage, AT, batch, mode)

    where = f"batch {batch}"
    for stage in (1, 2):
        name = f"reduction bytes, Z{stage} {OURS}, {where}"
        yield Bar(name, _bytes_ratio(results, row(stage, OURS)), _BYTES)
    once = _ratios(results, row(3, GATHER_ONCE))
    yield Bar.of_rounds(f"step, Z3 {GATHER_ONCE}, {where}", once, _GATHERED_ONCE[p2p])
    default = row(3, OURS)
    yield Bar.of_rounds(f"step, Z3 {OURS}, {where}", _ratios(results, default), _DEFAULT)
    native = None if default is None else native_of(results, default)
    for what, attribute in (("window", "window_mib"), ("peak", "peak_mib")):
        mib = [getattr(one, attribute, None) for one in (default, native)]
        yield Bar(f"{what} memory, Z3 {OURS}, {where}", over(*mib), _MEMORY)


def _ratios(results: Sequence[Result], result: Result | None) -> list[float]:
    return [] if result is None else ratios(result, native_of(results, result))


def _bytes_ratio(results: Sequence[Result], result: Result | None) -> float | None:
    native = None if result is None else native_of(results, result)
    if result is None or native is None or not result.sent:
        return None
    return over(result.sent_mib(reductions=True), native.sent_mib(reductions=True))
