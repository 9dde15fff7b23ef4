"""One training step in each of the styles that are compared.

A step takes an engine and a batch, runs forward(s), backward(s) and ``engine.step()``, and marks
the end of each. The marks are called while everything that a user's variables would hold is
alive, so that a mark may read memory or gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.retain.workload import Batch
from benchmarks.timing import Mark

StyledStep = Callable[[Any, Batch, Mark], None]
Backward = Callable[[Any, Tensor, bool], None]


def backward_phase(number: int) -> str:
    """The mark after backward `number`, counted from 1."""
    return f"backward {number}"


def engine_backward(engine: Any, loss: Tensor, retain_graph: bool) -> None:
    engine.backward(loss, retain_graph=retain_graph)


def scaled_backward(engine: Any, loss: Tensor, retain_graph: bool) -> None:
    engine.scale(loss, retain_graph=retain_graph).backward(retain_graph=retain_graph)


def plain_backward(engine: Any, loss: Tensor, retain_graph: bool) -> None:
    loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def ordinary(engine: Any, batch: Batch, mark: Mark, *, keep_graph: bool = False) -> None:
    """One forward, one backward. `keep_graph`: what it would hold if a second one followed."""
    outputs = engine(batch.inputs)
    loss = batch.loss(outputs, 0)
    mark("forward")
    engine_backward(engine, loss, keep_graph)
    mark(backward_phase(1))
    del loss, outputs
    engine.step()
    mark("step")


def one_forward(backward: Backward, *, zero_grad: bool) -> StyledStep:
    """One forward, a backward for each loss, called in one style."""

    def step(engine: Any, batch: Batch, mark: Mark) -> None:
        outputs = engine(batch.inputs)
        losses = [batch.loss(outputs, index) for index in range(len(batch.targets))]
        mark("forward")
        for number, loss in enumerate(losses, start=1):
            if number > 1 and zero_grad:
                engine.zero_grad()
                mark("zero_grad")
            backward(engine, loss, number < len(losses))
            mark(backward_phase(number))
        del loss, losses, outputs
        engine.step()
        mark("step")

    return step


def a_forward_each(engine: Any, batch: Batch, mark: Mark) -> None:
    """A forward and a backward for each loss: what one does where a graph can run but once.

    The gradients add up. ``engine.zero_grad()`` between them would not clear what ZeRO-3 has
    reduced already.
    """
    for index in range(len(batch.targets)):
        outputs = engine(batch.inputs)
        loss = batch.loss(outputs, index)
        mark(f"forward {index + 1}")
        engine_backward(engine, loss, False)
        mark(backward_phase(index + 1))
        del loss, outputs
    engine.step()
    mark("step")
