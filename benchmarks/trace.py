"""What ran at the same time in a step, from a trace of the device.

The profiler sees the device alone, so that the host is disturbed as little as may be. What tells
the phases of a step apart is then a kernel that nothing else launches, at the end of each of them;
the stream that it runs on is the one that forward and backward run on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.micro_steps import PHASES
from benchmarks.timing import Step, wait_for

_STEPS = 5
_MARK = "spin_kernel"  # of torch.cuda._sleep
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

#: Where it begins and where it ends.
Interval = tuple[float, float]


class Kernel(NamedTuple):
    """Or a copy; milliseconds."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def is_mark(self) -> bool:
        return _MARK in self.name

    @property
    def is_nccl(self) -> bool:
        return self.name.startswith("nccl")


@dataclass
class Shares:
    """Milliseconds of a phase, or of a whole step.

    ms: from its begin to its end on the device.
    nccl: while any NCCL kernel ran.
    hidden: while a kernel of the compute stream ran as well.
    idle: while none ran on the compute stream, other than NCCL's.
    """

    ms: float
    nccl: float
    hidden: float
    idle: float

    @property
    def exposed(self) -> float:
        return self.nccl - self.hidden

    @classmethod
    def total(cls, parts: Sequence[Shares]) -> Shares:
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    @classmethod
    def mean(cls, parts: Sequence[Shares]) -> Shares:
        return cls(*(value / len(parts) for value in astuple(cls.total(parts))))


def traced(step: Step, device: torch.device) -> dict[str, Shares] | None:
    """The shares of each phase, means of some steps; None where there is no NCCL."""
    if device.type != "cuda":
        return None
    wait_for(device)
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            # One more: the first meets a profiler that has just begun.
            for _ in range(1 + _STEPS):
                _mark("begin")
                step(_mark)
            wait_for(device)
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return shares(kernels(json.loads(path.read_text())))


def kernels(trace: Mapping[str, Any]) -> list[Kernel]:
    """What ran on the device, of a trace in Chrome's format; ranges that have a name did not."""
    return [
        Kernel(
            event["name"],
            event["args"]["stream"],
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ]


def shares(ran: Sequence[Kernel]) -> dict[str, Shares]:
    """Of each phase: the mean of all steps but the first."""
    marks = sorted((kernel for kernel in ran if kernel.is_mark), key=lambda mark: mark.begin)
    each, rest = divmod(len(marks), 1 + len(PHASES))
    if rest or each < 2:
        raise RuntimeError(f"{len(marks)} marks in a trace of steps with {1 + len(PHASES)} each")
    work = [kernel for kernel in ran if not kernel.is_mark]
    nccl = union(kernel[2:] for kernel in work if kernel.is_nccl)
    compute = union(
        kernel[2:] for kernel in work if not kernel.is_nccl and kernel.stream == marks[0].stream
    )
    _, *steps = _phases(marks)
    return {
        name: Shares.mean([_shares(step[number], nccl, compute) for step in steps])
        for number, name in enumerate(PHASES)
    }


def _phases(marks: Sequence[Kernel]) -> Iterator[list[Interval]]:
    """When each phase of each step ran: from mark to mark."""
    for first in range(0, len(marks), 1 + len(PHASES)):
        step = marks[first : first + 1 + len(PHASES)]
        yield [(begin.end, end.begin) for begin, end in pairwise(step)]


def _shares(phase: Interval, nccl: list[Interval], compute: list[Interval]) -> Shares:
    communicated, computed = (intersection(those, [phase]) for those in (nccl, compute))
    return Shares(
        ms=(ms := length([phase])),
        nccl=length(communicated),
        hidden=length(intersection(communicated, computed)),
        idle=ms - length(computed),
    )


def _mark(_phase: str) -> None:
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


# Intervals of time. What `union` and `intersection` return is disjoint and in order, and
# `intersection` and `length` want it so.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Those that overlap or touch become one; those without a length are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin = max(some[i][0], others[j][0])
        end = min(some[i][1], others[j][1])
        if begin < end:
            shared.append((begin, end))
        # The one that ends first meets nothing that comes later.
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
