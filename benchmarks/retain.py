"""zero3_retain, measured: ``torchrun --nproc-per-node 2 -m benchmarks.retain [options]``.

Prints Markdown on rank 0 and, with ``--json``, keeps everything behind it. Without CUDA it runs a
small version on gloo, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import table
from benchmarks.measure import Bench, Result
from benchmarks.options import positive
from benchmarks.provenance import provenance
from benchmarks.rows import CRASH, LOSSES, ROWS, TURNS, Row
from benchmarks.timing import Spread
from benchmarks.workload import Workload, free

# A rank that waits longer has lost the others: end with a message, not at a job's time limit.
_PATIENCE = timedelta(minutes=2)
# bf16 rounds to 4e-3; a lost or doubled gradient is off by its own size.
_GRADIENT_TOLERANCE = 2e-2

_FULL = {"layers": 16, "width": 4096, "batch": 512, "warmup": 5, "steps": 20, "rounds": 10}
_SMOKE = {"layers": 2, "width": 64, "batch": 8, "warmup": 3, "steps": 2, "rounds": 2}


def main() -> int:
    """Run what the command line asks for; 0 if every row did what it should."""
    options = _parse()
    device = _join(options.device)
    run = _Run(options, _bench(options, device))
    run.rows(options.only)
    run.show()
    failures = run.failures()
    for failure in failures:
        run.say(f"FAILED: {failure}")
    dist.destroy_process_group()
    return 1 if failures else 0


class _Run:
    """The rows one after another, and what came of them."""

    def __init__(self, options: argparse.Namespace, bench: Bench) -> None:
        self._options = options
        self._bench = bench
        self._provenance = provenance(bench.device, options.commit)
        self.results: dict[int, Result] = {}

    def rows(self, numbers: Sequence[int]) -> None:
        self.say(", ".join(f"{key} {value}" for key, value in self._provenance.items()))
        for turn in TURNS:
            if rows := [row for row in turn if row.number in numbers]:
                self._run(rows, partial(self._bench.in_turn, rows))
        # Last, for whatever a crash leaves behind.
        if CRASH.number in numbers:
            self._run([CRASH], lambda _: self._bench.once(CRASH))

    def show(self) -> None:
        results = self.results.values()
        self.say("", table.rows(results), "", table.phases(results), "")
        self.say(table.bars_table(table.bars(self.results)), "")
        if self._bench.device.type == "cpu":
            self.say("On CPU these times mean nothing; on GPUs the bars do.")

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

    def say(self, *lines: str) -> None:
        """Print on one rank."""
        if dist.get_rank() == 0:
            print(*lines, sep="\n", flush=True)

    def _run(self, rows: Sequence[Row], work: Callable[[list[Result]], None]) -> None:
        results = [Result(row.number, row.title) for row in rows]
        self.results.update({result.number: result for result in results})
        self._attempt(results, work)
        for result in results:
            done = f"{Spread.of(result.totals).median:.2f} ms" if result.times else "not timed"
            self.say(f"row {result.number} ({result.title}): {result.error or done}")

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
        path: Path | None = self._options.json
        if path is None or dist.get_rank() != 0:
            return
        document = {
            "provenance": self._provenance,
            "options": {
                k: v for k, v in vars(self._options).items() if k not in ("json", "commit")
            },
            "bars": [{**asdict(bar), "held": bar.held} for bar in table.bars(self.results)],
            "idle_ratio_by_round": table.ratios(self.results, table.IDLE, table.ORDINARY),
            "rows": {number: _summary(result) for number, result in self.results.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


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


def _join(kind: str) -> torch.device:
    """Bring the process group up. Nothing of DeepSpeed is compiled."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    # On CPU it would build a shared-memory all-reduce with g++; this table is its own switch.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # The patch comes and goes with every block: what applying has to note is no news here.
    logging.getLogger("ds_patches").addFilter(lambda record: record.levelno > logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch deprecates, with a warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if kind == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if kind == "cpu" else "nccl", timeout=_PATIENCE)
    return device


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.retain", description=__doc__)
    whole = ("layers", "width", "batch", "warmup", "steps", "rounds")
    for name in whole:
        parser.add_argument(
            f"--{name}", type=positive, help=f"{_FULL[name]} on CUDA, {_SMOKE[name]} on CPU"
        )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="CUDA where there is any")
    parser.add_argument("--prefetch-bucket", type=int, help="elements; one layer's if not given")
    parser.add_argument("--max-reuse-distance", type=int, default=10**9, help="elements")
    parser.add_argument("--persistence", type=int, default=0, help="threshold, elements")
    parser.add_argument("--only", type=_row_number, nargs="+", default=sorted(ROWS), metavar="ROW")
    parser.add_argument("--profile", action="store_true", help="count collectives")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep everything there")
    parser.add_argument("--commit", help="of the measured code, where there is no git")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 -m benchmarks.retain")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (_SMOKE if options.device == "cpu" else _FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
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
