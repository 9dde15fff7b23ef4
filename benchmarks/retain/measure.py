"""Measure rows of the table: build an engine, warm it up, look at it, time it, let it go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import collectives, probes
from benchmarks.engines import patch
from benchmarks.gradients import Forward, full_weights, plain_gradients, relative_error
from benchmarks.retain import styles
from benchmarks.retain.held import Held, held_after_backwards
from benchmarks.retain.rows import Row
from benchmarks.retain.workload import Batch, Workload
from benchmarks.timing import Rounds, Step, StepTimes, ignore, median_phases, time_block

_PATCH = "zero3_retain"
_PEAK_STEPS = 3


@dataclass
class Result(Rounds):
    """What was measured of one row, on rank 0."""

    number: int
    title: str
    error: str | None = None  # the exception that ended it
    times: list[list[StepTimes]] = field(default_factory=list)  # by round
    held: list[Held] = field(default_factory=list)
    held_graph_kept: list[Held] = field(default_factory=list)  # of an ordinary step
    peak_mib: float | None = None
    gradient_error: float | None = None
    gradient_error_last_alone: float | None = None  # of a step that lost all but the last loss
    collectives: dict[str, int] | None = None

    def fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"

    @property
    def phases(self) -> dict[str, float]:
        return median_phases([step.phases for block in self.times for step in block])


@dataclass(frozen=True)
class Bench:
    """A workload on this rank's device, and how much of it to run."""

    workload: Workload
    batch: Batch
    device: torch.device
    warmup: int
    steps: int
    rounds: int
    profile: bool

    def in_turn(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        """Rows on one engine, a block of each per round: A B C, C B A, A B C ...

        Drift of the machine meets all of them alike, and the memory they run in is the same. A
        row that cannot be looked at is recorded as such, and the others go on.
        """
        before = probes.allocated_mib(self.device)
        with self._workload(rows[0]).engine(self.device) as engine:
            turns = []
            for row, result in zip(rows, results, strict=True):
                try:
                    with patch(_PATCH, row.patched):
                        self._look(row, engine, result, before)
                except Exception as error:
                    result.fail(error)
                else:
                    turns.append((row, result))
            for _ in range(self.rounds):
                for row, result in turns:
                    with patch(_PATCH, row.patched):
                        result.times.append(self._time(row, engine))
                turns.reverse()

    def once(self, row: Row) -> None:
        """One step on a fresh engine, for its exception."""
        with patch(_PATCH, row.patched), self.workload.engine(self.device) as engine:
            self._step(row, engine)(ignore)

    def _workload(self, row: Row) -> Workload:
        if not row.holds_all:
            return self.workload
        return replace(self.workload, persistence=self.workload.width**2)

    def _step(self, row: Row, engine: Any) -> Step:
        return partial(row.step, engine, self.batch)

    def _time(self, row: Row, engine: Any) -> list[StepTimes]:
        return time_block(self._step(row, engine), self.device, self.warmup, self.steps)

    def _look(self, row: Row, engine: Any, result: Result, before: float | None) -> None:
        step = self._step(row, engine)
        for _ in range(self.warmup):
            step(ignore)
        weights = full_weights(engine)
        reference, last_alone = (
            plain_gradients(weights, partial(self._backwards, losses))
            for losses in (row.summed, row.summed[-1:])
        )
        result.gradient_error = probes.gradient_error(
            step, engine, reference, row.last_backward, self.device
        )
        result.gradient_error_last_alone = relative_error(last_alone, reference)
        result.held = held_after_backwards(step, engine, self.device, before)
        result.peak_mib = probes.peak_mib(step, self.device, before, _PEAK_STEPS)
        if row.step is styles.ordinary:
            kept = partial(styles.ordinary, engine, self.batch, keep_graph=True)
            result.held_graph_kept = held_after_backwards(kept, engine, self.device, before)
        if self.profile:
            result.collectives = collectives.counts(step, self.device)

    def _backwards(self, losses: Sequence[int], forward: Forward) -> None:
        """Over one forward, in plain PyTorch."""
        outputs = forward(self.batch.inputs)
        for index in losses:
            loss = self.batch.loss(outputs, index)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
