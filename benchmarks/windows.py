"""Ways to run several forwards and backwards and one optimizer step.

A step marks the end of up to four phases: enter (a context that holds reductions back), backwards
(all of them, with their forwards), exit (of the context), step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import DTYPE, loss_of
from benchmarks.gradients import plain_backwards
from benchmarks.timing import Mark

PHASES = ("enter", "backwards", "exit", "step")
MicroBatches = tuple[Tensor, ...]
Way = Callable[[Any, MicroBatches, Mark], None]


def _boundaries(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """DeepSpeed's first way: every backward but the last is said to be no boundary."""
    for number, inputs in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        engine.backward(loss_of(engine(inputs)))
    mark("backwards")
    engine.step()
    mark("step")
    # As an engine begins: it goes by its own count again, for the row that has the next turn.
    engine._is_gradient_accumulation_boundary = None


def _window(**arguments: Any) -> Way:
    """``coalesce_grad_reduction(**arguments)``."""

    def step(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
        with engine.coalesce_grad_reduction(**arguments):
            mark("enter")
            for inputs in micro_batches:
                engine.backward(loss_of(engine(inputs)))
            mark("backwards")
        mark("exit")
        engine.step()
        mark("step")

    return step


def _no_sync(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """The last backward is outside, and reduces what is there."""
    *held_back, last = micro_batches
    with engine.no_sync():
        mark("enter")
        for inputs in held_back:
            engine.backward(loss_of(engine(inputs)))
    engine.backward(loss_of(engine(last)))
    mark("backwards")
    engine.step()
    mark("step")


@dataclass(frozen=True)
class Mode:
    """A way. reduced: the phase after which gradients are; crash: what some releases say there."""

    step: Way
    reduced: str = "exit"
    stages: tuple[int, ...] = (1, 2, 3)
    crash: str = ""


FLOOR, NATIVE, OURS, GATHER_ONCE = "floor", "native", "ours", "ours, gather_once"
MODES = {
    "multi": Mode(_boundaries, reduced="backwards"),
    NATIVE: Mode(_window()),
    "no_sync": Mode(_no_sync, "backwards", (1,), crash="has already been reduced"),
    OURS: Mode(_window()),
    GATHER_ONCE: Mode(_window(gather_once=True), stages=(3,)),
}


class Floor:
    """What no way can be faster than: backwards in plain PyTorch and one reduce-scatter.

    No optimizer, no engine; the gradients of all parameters in one piece.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._params = list(model.parameters())
        ranks = dist.get_world_size()
        size = sum(param.numel() for param in self._params)
        self._sums = torch.zeros(-(-size // ranks) * ranks, dtype=DTYPE, device=device)
        self._share = torch.empty(self._sums.numel() // ranks, dtype=DTYPE, device=device)
        # torch 2.13 renamed it.
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def step(self, micro_batches: MicroBatches, mark: Mark) -> None:
        for param in self._params:
            param.grad = None
        plain_backwards(micro_batches, 1, self._model)
        mark("backwards")
        gradients = [param.grad.view(-1) for param in self._params if param.grad is not None]
        torch.cat(gradients, out=self._sums[: sum(map(torch.numel, gradients))])
        self._reduce_scatter(self._share, self._sums)
        mark("exit")
