"""Ordinary steps of one micro step or more, in a Transformer's shapes; AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.engines import around, batches, blocks, config, loss_of
from benchmarks.gradients import Forward, plain_backwards
from benchmarks.rows import Row, like
from benchmarks.timing import Mark, Step
from benchmarks.workload import STOCK, Workload

PHASES = ("forward", "backward", "step")
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

    def data(self, row: Row) -> MicroBatches:
        return batches(row["micro_steps"], row["batch"], self.options.width, self.device)

    def zero(self, row: Row) -> dict[str, Any]:
        """Its configuration of ZeRO."""
        raise NotImplementedError

    def engine(self, row: Row) -> AbstractContextManager[Any]:
        settings = config(row["batch"], row["micro_steps"], stage=row["stage"], **self.zero(row))
        return around(blocks(self.options.layers, self.options.width, self.device), settings)

    def step(self, row: Row, engine: Any, data: MicroBatches) -> Step:
        return partial(one_step, engine, data)

    def plain(self, row: Row, data: MicroBatches) -> Callable[[Forward], None]:
        return partial(plain_backwards, data, len(data))

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        return like(rows, row, mode=STOCK)
