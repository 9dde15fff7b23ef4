"""zero3_retain, measured: ``torchrun --nproc-per-node 2 -m benchmarks.retain [options]``.

Prints Markdown on rank 0 and, with ``--json``, keeps everything behind it. Without CUDA it runs a
small version on gloo, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import free
from benchmarks.options import common, filled, kept, write
from benchmarks.provenance import provenance
from benchmarks.ranks import join, leave, must_be_started_by_torchrun, say
from benchmarks.retain import table
from benchmarks.retain.measure import Bench, Result
from benchmarks.retain.rows import CRASH, LOSSES, ROWS, TURNS, Row
from benchmarks.retain.workload import Workload
from benchmarks.tables import bars_table
from benchmarks.timing import Spread

# bf16 rounds to 4e-3; a lost or doubled gradient is off by its own size.
_GRADIENT_TOLERANCE = 2e-2

_FULL = {"layers": 16, "width": 4096, "batch": 512, "warmup": 5, "steps": 20, "rounds": 10}
_SMOKE = {"layers": 2, "width": 64, "batch": 8, "warmup": 3, "steps": 2, "rounds": 2}


def main() -> int:
    """Run what the command line asks for; 0 if every row did what it should."""
    options = _parse()
    device = join(options.device)
    run = _Run(options, _bench(options, device))
    run.rows(options.only)
    run.show()
    return leave(run.failures())


class _Run:
    """The rows one after another, and what came of them."""

    def __init__(self, options: argparse.Namespace, bench: Bench) -> None:
        self._options = options
        self._bench = bench
        self._provenance = provenance(bench.device, options.commit)
        self.results: dict[int, Result] = {}

    def rows(self, numbers: Sequence[int]) -> None:
        say(", ".join(f"{key} {value}" for key, value in self._provenance.items()))
        for turn in TURNS:
            if rows := [row for row in turn if row.number in numbers]:
                self._run(rows, partial(self._bench.in_turn, rows))
        # Last, for whatever a crash leaves behind.
        if CRASH.number in numbers:
            self._run([CRASH], lambda _: self._bench.once(CRASH))

    def show(self) -> None:
        results = self.results.values()
        say("", table.rows(self.results), "", table.phases(results), "")
        say(bars_table("against row 1", table.bars(self.results)), "")
        if self._bench.device.type == "cpu":
            say("On CPU these times mean nothing; on GPUs the bars do.")

    def failures(self) -> list[str]:
        """Rows that did not do what the table says of them."""
        found = []
        for number, result in self.results.items():
            error = result.gradient_error
            if crash := ROWS[number].crash:
                if crash not in (result.error or ""):
                    found.append(f"row {number}: not the known crash: {result.error or 'it ran'}")
            elif result.error is not None:
                found.append(f"row {number}: {result.error}")
            elif error is None or math.isnan(error) or error > _GRADIENT_TOLERANCE:
                found.append(f"row {number}: gradients are off by {error}")
        return found

    def _run(self, rows: Sequence[Row], work: Callable[[list[Result]], None]) -> None:
        results = [Result(row.number, row.title) for row in rows]
        self.results.update({result.number: result for result in results})
        self._attempt(results, work)
        for result in results:
            done = f"{Spread.of(result.totals).median:.2f} ms" if result.times else "not timed"
            say(f"row {result.number} ({result.title}): {result.error or done}")

    def _attempt(self, results: list[Result], work: Callable[[list[Result]], None]) -> None:
        """Do one piece of work; its exception becomes a result, and the next piece begins anew."""
        try:
            work(results)
        except Exception as error:
            for result in results:
                result.fail(error)
            if not any(ROWS[result.number].crash for result in results):
                traceback.print_exc()
        free(self._bench.device)
        dist.barrier()
        self._save()

    def _save(self) -> None:
        """After every piece: what was measured stays, whatever comes next."""
        if dist.get_rank() != 0:
            return
        document = {
            "provenance": self._provenance,
            "options": kept(self._options),
            "bars": [bar.plain() for bar in table.bars(self.results)],
            "idle_ratio_by_round": table.ratios(self.results, table.IDLE, table.ORDINARY),
            "rows": {number: _summary(result) for number, result in self.results.items()},
        }
        write(self._options.json, document)


def _summary(result: Result) -> dict[str, Any]:
    """A result, and the statistics of its steps in place of the phases of each."""
    summary: dict[str, Any] = {}
    if result.times:
        summary["ms"] = asdict(Spread.of(result.totals))
        summary["ms_by_round"] = result.by_round
        summary["ms_by_phase"] = result.phases
    summary["ms_of_steps"] = result.totals
    return summary | {k: v for k, v in asdict(result).items() if k != "times"}


def _bench(options: argparse.Namespace, device: torch.device) -> Bench:
    workload = Workload(
        layers=options.layers,
        width=options.width,
        batch=options.batch,
        losses=LOSSES,
        prefetch_bucket=options.prefetch_bucket,
        max_reuse_distance=options.max_reuse_distance,
        persistence=options.persistence,
    )
    return Bench(
        workload=workload,
        batch=workload.data(dist.get_rank(), device),
        device=device,
        warmup=options.warmup,
        steps=options.steps,
        rounds=options.rounds,
        profile=options.profile,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.retain", description=__doc__)
    common(parser, _FULL, _SMOKE)
    parser.add_argument("--prefetch-bucket", type=int, help="elements; one layer's if not given")
    parser.add_argument("--max-reuse-distance", type=int, default=10**9, help="elements")
    parser.add_argument("--persistence", type=int, default=0, help="threshold, elements")
    parser.add_argument("--only", type=_row_number, nargs="+", default=sorted(ROWS), metavar="ROW")
    parser.add_argument("--profile", action="store_true", help="count collectives")
    options = filled(parser.parse_args(), _FULL, _SMOKE)
    must_be_started_by_torchrun(parser)
    if options.prefetch_bucket is None:
        options.prefetch_bucket = options.width**2
    return options


def _row_number(text: str) -> int:
    value = int(text)
    if value not in ROWS:
        raise argparse.ArgumentTypeError(f"the rows are {', '.join(map(str, ROWS))}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
