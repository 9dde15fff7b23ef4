"""Times of a step and of its parts, in milliseconds.

Device work is asynchronous, so on a GPU the marks are CUDA events, read after the last step of a
block: nothing waits between two steps that would not wait in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

#: Called by a step at the end of each of its phases, with the phase's name.
Mark = Callable[[str], None]
#: One training step that reports its phases.
Step = Callable[[Mark], None]
#: A phase that has ended: its name, the CUDA event then if there is a GPU, and the host's clock.
_Mark = tuple[str, Any, float]


class Block(NamedTuple):
    """Milliseconds of the steps of one round, and the medians of their phases.

    `host_ms_by_phase`: what the phases took the host, which on a GPU runs ahead.
    """

    ms: list[float]
    ms_by_phase: dict[str, float]
    host_ms_by_phase: dict[str, float]


def ignore(phase: str) -> None:
    """The mark of a step that nobody measures."""


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, ...]:
    """The first, the median and the third of one value or more."""
    several = values if len(values) > 1 else [*values] * 2
    return tuple(statistics.quantiles(several, n=4, method="inclusive"))


def time_block(step: Step, device: torch.device, warmup: int, steps: int) -> Block:
    """Run `warmup` steps, then time each of `steps`."""
    for _ in range(warmup):
        step(ignore)
    recorded = [_record(step, device) for _ in range(steps)]
    wait_for(device)
    whole = [_ms(marks[0], marks[-1]) for marks in recorded]
    phases = [{end[0]: _ms(begin, end) for begin, end in pairwise(marks)} for marks in recorded]
    host = [{end[0]: _host_ms(begin, end) for begin, end in pairwise(marks)} for marks in recorded]
    return Block(whole, median_phases(phases), median_phases(host))


def median_phases(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over steps of one kind."""
    return {name: statistics.median(step[name] for step in phases) for name in phases[0]}


def _record(step: Step, device: torch.device) -> list[_Mark]:
    """The begin of one step, and the end of each of its phases."""
    marks: list[_Mark] = []

    def mark(phase: str) -> None:
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        marks.append((phase, event, time.perf_counter()))

    mark("begin")
    step(mark)
    return marks


def _ms(begin: _Mark, end: _Mark) -> float:
    if begin[1] is None:
        return _host_ms(begin, end)
    return float(begin[1].elapsed_time(end[1]))


def _host_ms(begin: _Mark, end: _Mark) -> float:
    return 1e3 * (end[2] - begin[2])
