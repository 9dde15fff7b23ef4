"""coalesce, measured: ``torchrun --nproc-per-node 2 -m benchmarks.coalesce [options]``.

Prints Markdown on rank 0 and, with ``--json``, keeps everything behind it. NCCL_P2P_DISABLE=1 in
the environment measures machines without direct copies between GPUs. Without CUDA it runs a small
version on gloo, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.coalesce import table
from benchmarks.coalesce.bars import bars
from benchmarks.coalesce.ends import End, ends
from benchmarks.coalesce.measure import Bench, Result, native_of, ratios
from benchmarks.coalesce.modes import FLOOR, MODES, modes_of
from benchmarks.collectives import REDUCTIONS
from benchmarks.engines import free
from benchmarks.micro_batches import Workload
from benchmarks.options import common, filled, kept, write
from benchmarks.provenance import p2p, provenance
from benchmarks.ranks import join, leave, must_be_started_by_torchrun, say
from benchmarks.tables import Bar, bars_table
from benchmarks.timing import Spread, median_phases

# bf16 rounds to 4e-3; a lost or doubled gradient is off by its own size.
_TOLERANCE = 2e-2

_FULL = {
    "stages": [1, 2, 3],
    "backwards": [2, 4, 8],
    "batches": [256, 4096],
    "layers": 8,
    "width": 4096,
    "reduce_bucket_size": 5 * 10**8,
    "warmup": 2,
    "steps": 6,
    "rounds": 15,
}
_SMOKE = {
    "stages": [1, 2, 3],
    "backwards": [2, 4],
    "batches": [8],
    "layers": 2,
    "width": 64,
    "reduce_bucket_size": 10**4,
    "warmup": 1,
    "steps": 1,
    "rounds": 2,
}


def main() -> int:
    """Run what the command line asks for; 0 if every row did what it should."""
    options = _parse()
    run = _Run(options, join(options.device))
    run.rows()
    run.show()
    return leave(run.failures())


class _Run:
    """The stages one after another, and what came of them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._bench = Bench(device, options.warmup, options.steps, options.rounds)
        self._provenance = provenance(device, options.commit)
        self._ends: dict[tuple[int, int], dict[str, End]] = {}
        self.results: list[Result] = []

    def rows(self) -> None:
        say(", ".join(f"{key} {value}" for key, value in self._provenance.items()))
        for batch, backwards in product(self._options.batches, self._options.backwards):
            workload = Workload(
                layers=self._options.layers,
                width=self._options.width,
                batch=batch,
                backwards=backwards,
                reduce_bucket_size=self._options.reduce_bucket_size,
            )
            floor = Result(None, backwards, batch, FLOOR)
            self._attempt([floor], partial(self._bench.floor, workload, floor))
            for stage in self._options.stages:
                self._stage(workload, stage)

    def show(self) -> None:
        for text in table.tables(self.results):
            say("", text)
        say("", bars_table("against native, N=4", self._bars()), "")
        if self._device.type == "cpu":
            say("On CPU these times mean nothing; on GPUs the bars do.")

    def failures(self) -> Iterator[str]:
        """Rows that did not do what the table says of them."""
        modes = {mode.name: mode for mode in MODES}
        for result in self.results:
            if result.error is not None:
                if result.stage is None or not modes[result.mode].may_raise(result.error):
                    yield f"{result}: {result.error}"
                continue
            if result.stage is not None:
                yield from _wrong(result)
            calls = Counter(one.kind for one in result.sent)
            for kind in REDUCTIONS:
                if calls[kind] != (ran := result.collectives.get(kind, 0)):
                    yield f"{result}: {ran} {kind} ran, {calls[kind]} were seen: its bytes are off"

    def _stage(self, workload: Workload, stage: int) -> None:
        """Each row on an engine of its own; those that ran, then in turn on a common one."""
        modes = modes_of(stage)
        key = (stage, workload.backwards)
        if key not in self._ends:
            self._ends[key] = ends(workload, stage, modes, self._device)
        ended = self._ends[key]
        results = []
        for mode in modes:
            result = Result(stage, workload.backwards, workload.batch, mode.name)
            result.error = ended[mode.name].error
            result.parameter_error = ended[mode.name].difference
            results.append(result)
        ran = [mode for mode in modes if ended[mode.name].error is None]
        self._attempt(
            results,
            lambda: self._bench.in_turn(
                workload, stage, ran, [result for result in results if result.error is None]
            ),
        )

    def _attempt(self, results: list[Result], work: Callable[[], None]) -> None:
        """Do one piece of work; its exception becomes a result, and the next piece begins anew."""
        self.results += results
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            for result in results:
                result.error = result.error or f"{type(error).__name__}: {error}"
        free(self._device)
        dist.barrier()
        for result in results:
            done = f"{Spread.of(result.totals).median:.2f} ms" if result.times else "not timed"
            say(f"{result}: {result.error or done}")
        self._save()

    def _bars(self) -> list[Bar]:
        return bars(self.results, self._options.batches, p2p(self._provenance))

    def _save(self) -> None:
        """After every piece: what was measured stays, whatever comes next."""
        if dist.get_rank() != 0:
            return
        document = {
            "provenance": self._provenance,
            "options": kept(self._options),
            "bars": [bar.plain() for bar in self._bars()],
            "rows": [self._summary(result) for result in self.results],
        }
        write(self._options.json, document)

    def _summary(self, result: Result) -> dict[str, Any]:
        """A result, and the statistics of its steps in place of the phases of each."""
        summary = {name: value for name, value in asdict(result).items() if name != "times"}
        summary["sent_mib_in_reductions"] = result.sent_mib(reductions=True)
        summary["sent_mib"] = result.sent_mib(reductions=False)
        if result.times:
            summary["ms"] = asdict(Spread.of(result.totals))
            summary["ms_by_round"] = result.by_round
            summary["ms_by_phase"] = median_phases([step.phases for step in result.steps])
            summary["host_ms_by_phase"] = median_phases([step.host for step in result.steps])
            summary["ms_of_steps"] = result.totals
        if by_round := ratios(result, native_of(self.results, result)):
            summary["ratio_to_native"] = asdict(Spread.of(by_round))
        return summary


def _wrong(result: Result) -> Iterator[str]:
    errors = {"gradients": result.gradient_error, "parameters": result.parameter_error}
    for what, error in errors.items():
        if error is None or math.isnan(error) or error > _TOLERANCE:
            yield f"{result}: {what} are off by {error}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.coalesce", description=__doc__)
    common(parser, _FULL, _SMOKE)
    options = filled(parser.parse_args(), _FULL, _SMOKE)
    must_be_started_by_torchrun(parser)
    if set(options.stages) - {1, 2, 3}:
        parser.error("the stages are 1, 2 and 3")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
