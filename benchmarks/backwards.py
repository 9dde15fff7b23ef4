"""A step with a loss or two, in each of the ways that are compared.

It marks the end of each of its phases, while all is alive that a user's variables would hold: a
mark may read memory or gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.timing import Mark

LOSSES = 2

Batch = tuple[Tensor, ...]  # the inputs, and a target for each loss
Way = Callable[[Any, Batch, Mark], None]
Backward = Callable[[Any, Tensor, bool], None]


def loss_of(batch: Batch, outputs: Tensor, index: int) -> Tensor:
    """A scalar whose graph holds nothing that the model's graph does not hold already."""
    return (outputs * batch[1 + index]).mean()


def engine_backward(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    engine.backward(loss, retain_graph=keep_graph)


def scaled_backward(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    engine.scale(loss, retain_graph=keep_graph).backward(retain_graph=keep_graph)


def plain_backward(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]


def ordinary(engine: Any, batch: Batch, mark: Mark, *, keep_graph: bool = False) -> None:
    """One forward, one backward. `keep_graph`: what it would hold if a second one followed."""
    outputs = engine(batch[0])
    loss = loss_of(batch, outputs, 0)
    mark("forward")
    engine_backward(engine, loss, keep_graph)
    mark("backward 1")
    del loss, outputs
    engine.step()
    mark("step")


def one_forward(backward: Backward, *, zero_grad: bool) -> Way:
    """One forward, a backward for each loss, called in one style."""

    def step(engine: Any, batch: Batch, mark: Mark) -> None:
        outputs = engine(batch[0])
        losses = [loss_of(batch, outputs, index) for index in range(LOSSES)]
        mark("forward")
        for count, loss in enumerate(losses, start=1):
            if count > 1 and zero_grad:
                engine.zero_grad()
                mark("zero_grad")
            backward(engine, loss, count < len(losses))
            mark(f"backward {count}")
        del loss, losses, outputs
        engine.step()
        mark("step")

    return step


def a_forward_each(engine: Any, batch: Batch, mark: Mark) -> None:
    """A forward and a backward for each loss: what one does where a graph can run but once.

    The gradients add up. ``engine.zero_grad()`` between them would not clear what ZeRO-3 has
    reduced already.
    """
    for index in range(LOSSES):
        outputs = engine(batch[0])
        loss = loss_of(batch, outputs, index)
        mark(f"forward {index + 1}")
        engine_backward(engine, loss, False)
        mark(f"backward {index + 1}")
        del loss, outputs
    engine.step()
    mark("step")
