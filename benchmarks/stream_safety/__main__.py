"""stream_safety, measured: ``torchrun --nproc-per-node 2 -m benchmarks.stream_safety [options]``.

Prints Markdown on rank 0 and, with ``--json``, keeps everything behind it. NCCL_P2P_DISABLE=1 in
the environment measures machines without direct copies between GPUs. Without CUDA it runs a small
version on gloo, whose times mean nothing and of which there is no trace.
"""

from __future__ import annotations

import argparse
import traceback
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import ds_patches
from benchmarks.engines import free
from benchmarks.micro_batches import Workload
from benchmarks.options import common, filled, kept, write
from benchmarks.provenance import p2p, provenance
from benchmarks.ranks import join, leave, must_be_started_by_torchrun, say
from benchmarks.stream_safety import table
from benchmarks.stream_safety.bars import bars
from benchmarks.stream_safety.measure import Bench
from benchmarks.stream_safety.results import Result, failures
from benchmarks.stream_safety.rows import MODES, OVERLAP, PATCH, PATCHED

_FULL = {
    "stages": [1, 2],
    "batches": [256, 4096, 16384],
    "reduce_bucket_sizes": [2**24, 5 * 10**7],  # width squared, which is "auto", and large
    "micro_steps": [1, 4],
    "layers": 24,
    "width": 4096,
    "warmup": 2,
    "steps": 6,
    "rounds": 3,
}
_SMOKE = {
    "stages": [1, 2],
    "batches": [8],
    "reduce_bucket_sizes": [10**3, 10**4],
    "micro_steps": [1],
    "layers": 6,
    "width": 64,
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
    return leave(failures(run.results))


class _Run:
    """The sizes one after another, and what came of them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._bench = Bench(device, options.patch, options.warmup, options.steps, options.rounds)
        self._provenance = provenance(device, options.commit)
        self.results: list[Result] = []

    def rows(self) -> None:
        say(", ".join(f"{key} {value}" for key, value in self._provenance.items()))
        options = self._options
        sizes = product(options.micro_steps, options.batches, options.reduce_bucket_sizes)
        for micro_steps, batch, bucket in sizes:
            workload = Workload(
                layers=options.layers,
                width=options.width,
                batch=batch,
                backwards=micro_steps,
                reduce_bucket_size=bucket,
                in_blocks=True,
                micro_steps=micro_steps,
            )
            self._group(workload)

    def show(self) -> None:
        say("", table.section(self._document()), "")
        if self._device.type == "cpu":
            say("On CPU these times mean nothing; on GPUs the bars do.")

    def _group(self, workload: Workload) -> None:
        """The rows of one of each; what ends them all begins anew with the next."""
        options = self._options
        sizes = (workload.batch, workload.reduce_bucket_size, workload.micro_steps)
        # In an order of ours: what the others are compared with comes first.
        results = [
            Result(stage, overlap, mode, *sizes)
            for stage in sorted(options.stages)
            for name, overlap in OVERLAP.items()
            for mode in MODES
            if name in options.overlap and mode in options.modes
        ]
        self.results += results
        try:
            self._bench.in_turn(workload, results)
        except Exception as error:
            traceback.print_exc()
            for result in results:
                result.fail(error)
        free(self._device)
        dist.barrier()
        for result in results:
            done = f"{result.spread.median:.2f} ms" if result.spread else "not timed"
            say(f"{result}: {result.error or done}")
        self._save()

    def _save(self) -> None:
        """After every group: what was measured stays, whatever comes next."""
        if dist.get_rank() == 0:
            write(self._options.json, self._document())

    def _document(self) -> dict[str, Any]:
        return {
            "provenance": self._provenance,
            "options": kept(self._options),
            "bars": [bar.plain() for bar in bars(self.results, p2p(self._provenance))],
            "rows": [result.plain() for result in self.results],
        }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.stream_safety", description=__doc__)
    common(parser, _FULL, _SMOKE)
    parser.add_argument("--overlap", choices=OVERLAP, nargs="+", default=list(OVERLAP))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--patch", default=PATCH, help=f"of the patched rows ({PATCH})")
    options = filled(parser.parse_args(), _FULL, _SMOKE)
    must_be_started_by_torchrun(parser)
    if set(options.stages) - {1, 2}:
        parser.error("the stages are 1 and 2")
    if PATCHED in options.modes and options.patch not in ds_patches.names():
        parser.error(f"there is no patch {options.patch}; without it there is --modes stock")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
