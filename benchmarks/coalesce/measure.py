"""Measure the rows of one stage: check each, look at it, time it in turn with the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import collectives, probes
from benchmarks.coalesce.floor import Floor
from benchmarks.coalesce.modes import NATIVE, Mode
from benchmarks.collectives import Sent
from benchmarks.engines import patch
from benchmarks.gradients import full_weights, plain_gradients
from benchmarks.micro_batches import MicroBatches, Workload, plain_backwards
from benchmarks.timing import Rounds, Step, StepTimes, ignore, time_block

PATCH = "coalesce"
_PEAK_STEPS = 3


@dataclass
class Result(Rounds):
    """What was measured of one row, on rank 0."""

    stage: int | None  # None: no engine
    backwards: int
    batch: int
    mode: str
    error: str | None = None  # the exception that ended it
    times: list[list[StepTimes]] = field(default_factory=list)  # by round
    gradient_error: float | None = None
    parameter_error: float | None = None
    sent: list[Sent] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    window_mib: float | None = None  # allocated after the last backward
    peak_mib: float | None = None

    def __str__(self) -> str:
        where = "" if self.stage is None else f"Z{self.stage} "
        return f"{where}{self.mode}, N={self.backwards}, batch {self.batch}"

    @property
    def steps(self) -> list[StepTimes]:
        return [step for block in self.times for step in block]

    def sent_mib(self, *, reductions: bool) -> float:
        """MiB that a rank sends in a step, or in the reductions before ``engine.step()``.

        What the step itself reduces are norms and flags, of a few bytes.
        """
        return (
            sum(
                one.bytes
                for one in self.sent
                if not reductions or (one.kind in collectives.REDUCTIONS and one.phase != "step")
            )
            / 2**20
        )


@dataclass(frozen=True)
class Bench:
    """How much of each workload to run."""

    device: torch.device
    warmup: int
    steps: int
    rounds: int

    def in_turn(
        self, workload: Workload, stage: int, modes: Sequence[Mode], results: Sequence[Result]
    ) -> None:
        """Rows on one engine, a block of each per round: A B C, C B A, A B C ...

        Drift of the machine meets all of them alike, and the memory they run in is the same.
        """
        micro_batches = workload.data(self.device)
        before = probes.allocated_mib(self.device)
        with workload.engine(stage, self.device) as engine:
            turns = list(zip(modes, results, strict=True))
            for mode, result in turns:
                step = partial(mode.step, engine, micro_batches)
                with patch(PATCH, mode.patched):
                    self._warm_up(step)
                    self._gradients(step, mode, engine, micro_batches, result)
                    self._look(step, result, before)
            for _ in range(self.rounds):
                for mode, result in turns:
                    step = partial(mode.step, engine, micro_batches)
                    with patch(PATCH, mode.patched):
                        result.times.append(self._time(step))
                turns.reverse()

    def floor(self, workload: Workload, result: Result) -> None:
        micro_batches = workload.data(self.device)
        before = probes.allocated_mib(self.device)
        step = partial(Floor(workload, self.device).step, micro_batches)
        self._warm_up(step)
        self._look(step, result, before)
        result.times = [self._time(step) for _ in range(self.rounds)]

    def _warm_up(self, step: Step) -> None:
        for _ in range(self.warmup):
            step(ignore)

    def _time(self, step: Step) -> list[StepTimes]:
        return time_block(step, self.device, self.warmup, self.steps)

    def _gradients(
        self, step: Step, mode: Mode, engine: Any, micro_batches: MicroBatches, result: Result
    ) -> None:
        weights = full_weights(engine)
        reference = plain_gradients(weights, partial(plain_backwards, micro_batches))
        result.gradient_error = probes.gradient_error(
            step, engine, reference, mode.reduced, self.device
        )

    def _look(self, step: Step, result: Result, before: float | None) -> None:
        result.sent = collectives.sent(step)
        result.collectives = collectives.counts(step, self.device)
        result.window_mib = probes.allocated_after(step, "backwards", self.device, before)
        result.peak_mib = probes.peak_mib(step, self.device, before, _PEAK_STEPS)


def ratios(result: Result, native: Result | None) -> list[float]:
    """One row's median over native's, round by round; empty if either was not timed."""
    if native is None:
        return []
    pairs = zip(result.by_round, native.by_round, strict=False)
    return [one / other for one, other in pairs]


def native_of(results: Sequence[Result], like: Result) -> Result | None:
    """The native row that shared the engine with `like`."""
    return find(results, like.stage, like.backwards, like.batch, NATIVE)


def find(
    results: Sequence[Result], stage: int | None, backwards: int, batch: int, mode: str
) -> Result | None:
    wanted = (stage, backwards, batch, mode)
    return next((r for r in results if (r.stage, r.backwards, r.batch, r.mode) == wanted), None)
