"""Measure the rows of one size, in turn, each on an engine of its own."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import probes
from benchmarks.engines import patch
from benchmarks.gradients import full_weights, plain_gradients
from benchmarks.micro_batches import MicroBatches, Workload, loss_of, plain_backwards
from benchmarks.stream_safety import agreement
from benchmarks.stream_safety.agreement import Agreement
from benchmarks.stream_safety.results import Result
from benchmarks.stream_safety.trace import traced
from benchmarks.timing import Mark, Step, StepTimes, ignore, time_block

_PEAK_STEPS = 3


def one_step(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """Every micro step; all that comes before the last backward counts as forward."""
    *others, last = micro_batches
    for inputs in others:
        engine.backward(loss_of(engine(inputs)))
        engine.step()
    loss = loss_of(engine(last))
    mark("forward")
    engine.backward(loss)
    mark("backward")
    engine.step()
    mark("step")


class Reference:
    """What the rows without overlap_comm came to, by stage; the others are held against it."""

    def __init__(self) -> None:
        self._of_stage: dict[int, list[Tensor]] = {}

    def against(self, result: Result, tensors: list[Tensor]) -> Agreement | None:
        """None for the reference itself, and where there is none."""
        if not result.overlap:
            self._of_stage.setdefault(result.stage, tensors)
        reference = self._of_stage.get(result.stage)
        if reference is None or reference is tensors:
            return None
        return Agreement.between(tensors, reference)


@dataclass(frozen=True)
class _Row:
    """A row whose engine stands."""

    result: Result
    engine: Any
    step: Step


@dataclass(frozen=True)
class Bench:
    """How much of each row to run, and the patch's name."""

    device: torch.device
    patch: str
    warmup: int
    steps: int
    rounds: int

    def in_turn(self, workload: Workload, results: Sequence[Result]) -> None:
        """All engines stand at once; a block of each row per round: A B C, C B A, A B C ...

        Drift of the machine meets all of them alike. Every row runs as many steps as any other,
        over the same batch, so that all can be compared after any of them.
        """
        with ExitStack() as engines:
            rows = self._built(engines, workload, results)
            turns = list(rows)
            for _ in range(self.rounds):
                for row in turns:
                    with patch(self.patch, row.result.patched):
                        row.result.take(self._time(row.step))
                turns.reverse()
            ends = Reference()
            for row in rows:
                row.result.end = ends.against(row.result, agreement.end(row.engine))
            # Last: what a profiler leaves behind in a process meets no timed step of these rows.
            for row in rows:
                with _recorded(row.result), patch(self.patch, row.result.patched):
                    row.result.trace = traced(row.step, self.device)

    def _built(
        self, engines: ExitStack, workload: Workload, results: Sequence[Result]
    ) -> list[_Row]:
        """Those that could be built and looked at."""
        micro_batches = workload.data(self.device)
        gradients, rows = Reference(), []
        for result in results:
            before = probes.allocated_mib(self.device)
            with _recorded(result), patch(self.patch, result.patched):
                own = replace(workload, overlap_comm=result.overlap)
                engine = engines.enter_context(own.engine(result.stage, self.device))
                row = _Row(result, engine, partial(one_step, engine, micro_batches))
                self._look(row, micro_batches, before)
                found = agreement.gradients(row.step, engine, self.device)
                result.gradients = gradients.against(result, found)
                rows.append(row)
        return rows

    def _look(self, row: _Row, micro_batches: MicroBatches, before: float | None) -> None:
        for _ in range(self.warmup):
            row.step(ignore)
        backwards = partial(plain_backwards, micro_batches, micro_steps=len(micro_batches))
        reference = plain_gradients(full_weights(row.engine), backwards)
        row.result.gradient_error = probes.gradient_error(
            row.step, row.engine, reference, "backward", self.device
        )
        del reference
        row.result.peak_mib = probes.peak_mib(
            row.step, self.device, before, _PEAK_STEPS, probes.max_active_mib
        )

    def _time(self, step: Step) -> list[StepTimes]:
        return time_block(step, self.device, self.warmup, self.steps)


@contextmanager
def _recorded(result: Result) -> Iterator[None]:
    """An exception is this row's, and the others go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        result.fail(error)
