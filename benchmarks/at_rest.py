"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest [options]``.

Ordinary steps of one engine, stock and patched in turns, and stock again, which is what a ratio is
worth: four blocks of a Transformer's shapes of width 2048, in bf16, AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import ready
from benchmarks.harness import main
from benchmarks.micro_steps import MicroSteps
from benchmarks.rows import Row, Run, like
from benchmarks.timing import StepTimes
from benchmarks.workload import PATCHED, STOCK, Series, Standing

_AGAIN = "stock again"
# Each of the others beside stock, whichever way the order turns.
_MODES = (PATCHED, STOCK, _AGAIN)
_FULL = {
    "stages": [1, 2, 3],
    "micro_steps": [1, 4],
    "batches": [256, 4096, 16384],
    "layers": 24,
    "width": 2048,
    "warmup": 2,
    "steps": 8,
    "rounds": 7,
}
_SMOKE = _FULL | {"batches": [8], "layers": 6, "width": 64, "steps": 2, "rounds": 2}


class AtRest(MicroSteps):
    __doc__ = __doc__
    name, title = "at_rest", "At rest: patched / stock (grey: stock / stock)"
    keys = ("stage", "micro_steps", "batch", "mode")
    full, smoke = _FULL, _SMOKE

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.patches = self.options.patches

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--patches", nargs="+", default=ready(), help="all, by default")

    def standing_together(self) -> Iterator[list[Row]]:
        of = self.options
        for sizes in product(of.stages, of.micro_steps, of.batches):
            yield [Row(dict(zip(self.keys, (*sizes, mode), strict=True))) for mode in _MODES]

    def zero(self, row: Row) -> dict[str, Any]:
        return {"reduce_bucket_size": self.options.width**2}

    def time(self, at: Standing) -> list[StepTimes]:
        """By the slowest rank: the others wait for it somewhere."""
        block = super().time(at)
        ms = torch.tensor([step.total for step in block], device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return [replace(step, total=one) for step, one in zip(block, ms.tolist(), strict=True)]

    def label(self, row: Row) -> tuple[str, str]:
        steps = f"{row['micro_steps']} micro step" + "s" * (row["micro_steps"] > 1)
        return f"ZeRO {row['stage']}, {steps}, {row['batch']} rows", row["mode"]

    def read(self, run: Run) -> list[Row]:
        """Until 2026-11-22 a run kept ratios alone."""
        if "mode" in run["rows"][0]:
            return super().read(run)
        kept = {PATCHED: "patched", _AGAIN: "stock"}
        return [
            Row({**{key: one.get(key) for key in self.keys}, "mode": mode}, found=found)
            for one in run["rows"]
            for mode in _MODES
            for found in [{"ratios": one[kept[mode]]} if mode in kept else {}]
        ]

    def series(self, run: Run) -> Iterator[Series]:
        rows = self.read(run)
        for row in filter(self.is_patched, rows):
            again = like(rows, row, mode=_AGAIN)
            found = [[] if one is None else self.ratios(one, rows) for one in (row, again)]
            yield Series(self.label(row)[0], found[0], again=found[1])


if __name__ == "__main__":
    raise SystemExit(main(AtRest))
