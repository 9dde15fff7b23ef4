"""The bars: the patched step at ZeRO-2 over stock's, and numbers that overlap must not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.stream_safety.results import Result, find, groups, ratios
from benchmarks.stream_safety.rows import PATCHED, STOCK, name_of
from benchmarks.tables import Bar

# Where the GPUs cannot copy directly between each other, so that communication is what takes long.
_STEP = 0.90


def bars(results: Sequence[Result], p2p: bool) -> list[Bar]:
    """Of the rows with overlap_comm. `p2p`: whether GPUs copy directly between each other."""
    return [bar for where, group in groups(results) for bar in _of_group(where, group, p2p)]


def _of_group(where: str, group: Sequence[Result], p2p: bool) -> Iterator[Bar]:
    stages = sorted({result.stage for result in group})
    for stage in stages:
        rows = [find(group, where, stage, True, mode) for mode in (PATCHED, STOCK)]
        bar = _STEP if stage == 2 and not p2p else None
        name = f"step, {name_of(stage, True)}, {where}: patched / stock"
        yield Bar.of_rounds(name, ratios(*rows), bar)
    for stage in stages:
        patched = find(group, where, stage, True, PATCHED)
        name = f"elements unlike overlap off, {name_of(stage, True)} patched, {where}"
        yield Bar(name, patched.differing if patched else None, 0)
