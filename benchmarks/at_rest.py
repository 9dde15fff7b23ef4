"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest [options]``.

Ordinary steps of one engine, stock and patched in turns, and stock again, which is what a ratio is
worth: four blocks of a Transformer's shapes of width 2048, in bf16, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import around, batches, blocks, config, loss_of, ready
from benchmarks.harness import main
from benchmarks.probes import Forward, plain_backwards
from benchmarks.rows import Row
from benchmarks.timing import Block, Mark, Step
from benchmarks.workload import PATCHED, STOCK, Standing, Workload

AGAIN = "stock again"
# Each of the others beside stock, whichever way the order turns.
_MODES = (PATCHED, STOCK, AGAIN)
_FULL: dict[str, Any] = {
    "patches": [],  # all that are for this release
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

MicroBatches = tuple[Tensor, ...]


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


class MicroSteps(Workload):
    """A row has a stage, a batch size, a number of micro steps, and a mode, one of them stock."""

    #: A row's configuration of ZeRO.
    zero: Callable[[Row], dict[str, Any]]

    def data(self, row: Row) -> MicroBatches:
        return batches(row["micro_steps"], row["batch"], self.options.width, self.device)

    def engine(self, row: Row) -> AbstractContextManager[Any]:
        settings = config(row["batch"], row["micro_steps"], stage=row["stage"], **self.zero(row))
        return around(blocks(self.options.layers, self.options.width, self.device), settings)

    def step(self, row: Row, engine: Any, data: MicroBatches) -> Step:
        return partial(one_step, engine, data)

    def plain(self, row: Row, data: MicroBatches) -> Callable[[Forward], None]:
        return partial(plain_backwards, data, len(data))


class AtRest(MicroSteps):
    __doc__ = __doc__
    name = "at_rest"
    keys = ("stage", "micro_steps", "batch", "mode")
    full, smoke, named_by_words = _FULL, _SMOKE, ("patches",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.patches = self.options.patches = self.options.patches or ready()

    def standing_together(self) -> Iterator[list[Row]]:
        of = self.options
        for sizes in product(of.stages, of.micro_steps, of.batches):
            yield self.rows(*sizes, modes=_MODES)

    def zero(self, row: Row) -> dict[str, Any]:
        return {"reduce_bucket_size": self.options.width**2}

    def time(self, at: Standing) -> Block:
        """By the slowest rank: the others wait for it somewhere."""
        block = super().time(at)
        ms = torch.tensor(block.ms, device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return block._replace(ms=ms.tolist())

    def label(self, row: Row) -> tuple[str, str]:
        steps = f"{row['micro_steps']} micro step" + "s" * (row["micro_steps"] > 1)
        return f"ZeRO {row['stage']}, {steps}, {row['batch']} rows", row["mode"]


if __name__ == "__main__":
    raise SystemExit(main(AtRest))
