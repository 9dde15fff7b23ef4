"""Measure one engine: its first steps, whether these trained it, then what a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.dc_fallback import trained
from benchmarks.dc_fallback.results import Compilations, Measured, Peak
from benchmarks.dc_fallback.rows import EAGER
from benchmarks.dc_fallback.workload import Workload
from benchmarks.engines import free
from benchmarks.probes import allocated_mib, max_allocated_mib
from benchmarks.timing import Mark, ignore, median_phases, time_block

_PEAK_STEPS = 3
_SETTLE = 3  # steps: the comparison has emptied the allocator's cache


class Bench(NamedTuple):
    """How much to run.

    reference: what eager trained. The first eager row keeps it there, the others are compared.
    """

    workload: Workload
    device: torch.device
    warmup: int
    steps: int
    reference: Path | None

    def measure(self, measured: Measured) -> None:
        before = allocated_mib(self.device)
        model = self.workload.model(measured.skipped, self.device)
        starts = trained.starts(model)
        run = _Run(self.workload.engine(model, measured.mode), self.workload.data(self.device))
        for _ in range(self.warmup):
            if peak := self._peak(run, before):
                measured.first_peaks.append(peak)
            measured.losses.append(run.loss.item())
        measured.compilations = dynamo_counts()
        self._compare(run.engine, starts, measured)
        times = time_block(run.step, self.device, _SETTLE, self.steps)
        measured.ms_by_phase = median_phases([step.phases for step in times])
        measured.host_ms_by_phase = median_phases([step.host for step in times])
        if before is not None:
            measured.peak = Peak.most([self._peak(run, before) for _ in range(_PEAK_STEPS)])
        measured.recompilations = dynamo_counts().graphs - measured.compilations.graphs
        measured.ms = [step.total for step in times]
        run.engine.destroy()

    def _peak(self, run: _Run, before: float | None) -> Peak | None:
        """One step, and the most that it held, above `before`."""
        if before is None:
            run.step(ignore)
            return None
        until: dict[str, float] = {}

        def look(phase: str) -> None:
            until[phase] = max_allocated_mib(self.device) - before

        torch.cuda.reset_peak_memory_stats(self.device)
        run.step(look)
        return Peak(whole=until["step"], backward=until["backward"])

    def _compare(self, engine: Any, starts: dict[str, Tensor], measured: Measured) -> None:
        if self.reference is None:
            return
        found = trained.trained(engine, starts)
        if self.reference.exists():
            measured.differences = trained.differences(found, self.reference, self.device)
        elif measured.mode == EAGER:
            trained.keep(found, self.reference)
        free(self.device)


class _Run:
    """An engine and the one batch that it is trained on."""

    def __init__(self, engine: Any, batch: tuple[Tensor, Tensor]) -> None:
        self.engine = engine
        self.loss = torch.tensor(float("nan"))
        self._batch = batch

    def step(self, mark: Mark) -> None:
        loss = self.engine(*self._batch)
        mark("forward")
        self.engine.backward(loss)
        mark("backward")
        self.loss = loss.detach()
        del loss
        self.engine.step()
        mark("step")


def dynamo_counts() -> Compilations:
    """Of this process so far: nothing resets these counters."""
    from torch._dynamo.utils import counters

    return Compilations(
        graphs=counters["stats"]["unique_graphs"],
        frames=counters["frames"]["ok"],
        graph_breaks=sum(counters["graph_break"].values()),
    )
