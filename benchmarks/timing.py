"""Times of a step and of its parts, in milliseconds.

Device work is asynchronous, so on a GPU the marks are CUDA events, read after the last step of a
block: nothing waits between two steps that would not wait in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
    """One step: milliseconds in all, and per phase in the order they ran.

    `host`: what the phases took the host, which on a GPU runs ahead.
    """

    total: float
    phases: dict[str, float]
    host: dict[str, float]


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
    return [_read(*marks) for marks in recorded]


def median_phases(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over steps of one kind."""
    return {name: statistics.median(step[name] for step in phases) for name in phases[0]}


class _Marks(NamedTuple):
    """When a step began and when each of its phases ended, by one clock."""

    begin: Moment
    ends: dict[str, Moment]

    def phases(self) -> dict[str, float]:
        begins = [self.begin, *self.ends.values()]
        return {
            name: begin.elapsed_time(end)
            for begin, (name, end) in zip(begins, self.ends.items(), strict=False)
        }


def _record(step: Step, device: torch.device) -> tuple[_Marks, _Marks]:
    """One step by the device's clock and by the host's."""
    on_device, on_host = _Marks(_now(device), {}), _Marks(HostMoment(), {})

    def mark(phase: str) -> None:
        on_device.ends[phase] = _now(device)
        on_host.ends[phase] = HostMoment()

    step(mark)
    return on_device, on_host


def _read(on_device: _Marks, on_host: _Marks) -> StepTimes:
    *_, last = on_device.ends.values()
    return StepTimes(on_device.begin.elapsed_time(last), on_device.phases(), on_host.phases())


def _now(device: torch.device) -> Moment:
    if device.type != "cuda":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
