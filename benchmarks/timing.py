"""Times of a step and of its parts, in milliseconds.

Device work is asynchronous, so on a GPU the marks are CUDA events, read after the last step of a
block: nothing waits between two steps that would not wait in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: Called by a step at the end of each of its phases, with the phase's name.
Mark = Callable[[str], None]
#: One training step that reports its phases.
Step = Callable[[Mark], None]


class Moment(Protocol):
    """A point in time, as ``torch.cuda.Event`` has it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`."""


class HostMoment:
    """Now, by the host's clock."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostMoment) -> float:
        return (end._at - self._at) * 1e3


def ignore(phase: str) -> None:
    """The mark of a step that nobody measures."""


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class StepTimes:
    """One step: milliseconds in all, and per phase in the order they ran."""

    total: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Spread:
    """A sample by its median, quartiles and ends."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """`values`: at least one."""
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else (values[0],) * 3
        )
        return cls(median, low, high, min(values), max(values), len(values))


def time_block(step: Step, device: torch.device, warmup: int, steps: int) -> list[StepTimes]:
    """Run `warmup` steps, then time each of `steps`."""
    for _ in range(warmup):
        step(ignore)
    recorded = [_record(step, device) for _ in range(steps)]
    wait_for(device)
    return [_read(begin, marks) for begin, marks in recorded]


def median_phases(times: Sequence[StepTimes]) -> dict[str, float]:
    """The median of each phase over steps of one kind."""
    return {
        phase: statistics.median(step.phases[phase] for step in times) for phase in times[0].phases
    }


def _record(step: Step, device: torch.device) -> tuple[Moment, list[tuple[str, Moment]]]:
    marks: list[tuple[str, Moment]] = []
    begin = _now(device)
    step(lambda phase: marks.append((phase, _now(device))))
    return begin, marks


def _read(begin: Moment, marks: list[tuple[str, Moment]]) -> StepTimes:
    phases = {}
    previous = begin
    for phase, moment in marks:
        phases[phase] = previous.elapsed_time(moment)
        previous = moment
    return StepTimes(begin.elapsed_time(previous), phases)


def _now(device: torch.device) -> Moment:
    if device.type != "cuda":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
