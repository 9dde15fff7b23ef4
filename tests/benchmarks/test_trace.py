"""What a trace says of a step, and the arithmetic of intervals, against counting ticks."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.trace import Interval, Shares, intersection, kernels, length, shares, union

NAME = "AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def on_device(name: str, stream: int, begin: float, ms: float, kind: str = "kernel") -> Any:
    """As a trace has it, in microseconds."""
    args = {"device": 0, "stream": stream}
    times = {"ts": 1e9 + 1e3 * begin, "dur": 1e3 * ms}
    return {"ph": "X", "cat": kind, "name": name, "args": args} | times


def mark(begin: float) -> Any:
    return on_device("void at::cuda::(anonymous namespace)::spin_kernel(long)", 7, begin, 0.5)


def step_of(begin: float, late: float) -> list[Any]:
    """10 ms forward, 20 ms backward, 10 ms step; `late`: how long NCCL works on after computing."""
    backward = begin + 10.5
    return [
        *(mark(begin + at) for at in (-0.5, 10, 30.5, 41)),
        on_device("gemm", 7, begin, 9),
        on_device("gemm", 7, backward, 8),
        on_device("Memcpy DtoD", 7, backward + 8, 2, "gpu_memcpy"),
        on_device("gemm", 7, backward + 13, 7 - late),
        on_device(f"ncclDevKernel_{NAME}", 20, backward + 5, 15),
        on_device("div_kernel", 20, backward + 10, 3),  # on the reduction's stream: not computing
        on_device(f"ncclDevKernel_{NAME}", 7, begin + 31, 4),
        on_device("adam", 7, begin + 35, 6),
        on_device("nccl:all_reduce", 20, backward, 20, "gpu_user_annotation"),
        on_device("Optimizer.step#AdamW.step", 7, begin + 31, 10, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 1.0},
    ]


def trace_of(*late: float) -> dict[str, Any]:
    events = [event for number, ms in enumerate(late) for event in step_of(100 * number, ms)]
    return {"traceEvents": list(reversed(events))}


def test_a_trace_says_what_was_hidden() -> None:
    found = shares(kernels(trace_of(7, 1, 3)))  # the first is not counted
    assert list(found) == ["forward", "backward", "step"]
    expected = {
        "forward": Shares(ms=10, nccl=0, hidden=0, idle=1),
        "backward": Shares(ms=20, nccl=15, hidden=10, idle=5),
        "step": Shares(ms=10, nccl=4, hidden=0, idle=4),
    }
    for name, one in expected.items():
        assert vars(found[name]) == pytest.approx(vars(one)), name
    assert found["backward"].exposed == pytest.approx(5)
    assert Shares.total(list(found.values())).nccl == pytest.approx(19)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_trace_without_all_marks_is_an_error(lost: int) -> None:
    ran = kernels(trace_of(1, 1))
    marks = [kernel for kernel in ran if kernel.is_mark]
    with pytest.raises(RuntimeError, match="marks in a trace"):
        shares([kernel for kernel in ran if kernel not in marks[: 4 if lost == 0 else lost]])


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


def some_intervals(dice: random.Random) -> list[Interval]:
    begins = [dice.randrange(40) for _ in range(dice.randrange(8))]
    return [(begin, begin + dice.randrange(8)) for begin in begins]


def test_intervals_are_those_of_their_ticks() -> None:
    dice = random.Random(0)
    for _ in range(300):
        some, others = some_intervals(dice), some_intervals(dice)
        shared = intersection(union(some), union(others))
        assert shared == intersection(union(others), union(some))
        for found, expected in (
            (union(some), ticks(some)),
            (shared, ticks(some) & ticks(others)),
        ):
            assert ticks(found) == expected
            assert length(found) == len(expected)
            # In order, and what overlaps or touches is one.
            assert all(one[1] <= other[0] for one, other in pairwise(found))
        assert all(one[1] < other[0] for one, other in pairwise(union(some)))
        assert all(begin < end for begin, end in union(some))
