"""One engine, and the backwards that run over each of its forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ds_patches.core import engines

from .flat_sum import FlatSum
from .graph_task import TaskWatch
from .lost import LostGradients, OnLost
from .master_sum import MasterSum
from .partition_sum import PartitionSum
from .residency import Residency
from .upstream import engine as upstream_engine
from .upstream import flat
from .window import ForwardWindow

logger = logging.getLogger("ds_patches.zero3_retain")


class GradientSum(Protocol):
    """How a ZeRO stage adds up the backwards of one step."""

    def begin_backward(self) -> None: ...
    def begin_backward_again(self) -> None: ...
    def drop(self) -> None: ...
    def abandon(self) -> None: ...
    def step_taken(self) -> None: ...


class RetainedEngine:
    """What the patch remembers about one engine between its backwards."""

    def __init__(self, engine: Any, policy: OnLost) -> None:
        self._engine = engine
        self._watch = TaskWatch()
        self._steps = 0
        self._begun = 0  # backwards, ever
        self._zeroed = False  # zero_grad() since the last backward
        self._dropped = False  # the last backward raised
        self.residency: Residency | None = None
        optimizer = engine.optimizer
        self._lost = lost = LostGradients(policy, engine.gradient_accumulation_steps(), optimizer)
        self.sum: GradientSum
        if engine.zero_optimization_partition_weights():
            self.residency = Residency(optimizer.parameter_offload)
            self.residency.install()
            self.sum = PartitionSum(optimizer, lost)
        elif flat.keeps_its_own_sum(optimizer):
            self.sum = MasterSum(optimizer)
        else:
            self.sum = FlatSum(optimizer, lost)

    def open_window(self, outputs: Any) -> None:
        """A forward has run: watch for the backwards over it."""
        steps = self._steps
        ForwardWindow(outputs, lambda window: self._backward_begins(window, steps))

    def _backward_begins(self, window: ForwardWindow, steps: int) -> None:
        self.recover()
        self._watch.enter()
        self._begun += 1
        self._dropped = False
        if window.backwards == 1:
            self.sum.begin_backward()
            if self.residency is not None:
                self.residency.begin_backward()
        else:
            self._backward_begins_again(steps)
        self._zeroed = False

    def _backward_begins_again(self, steps: int) -> None:
        if self.residency is not None and steps != self._steps:
            raise RuntimeError(
                "backward over a forward from before engine.step(): its activations belong to the "
                "old parameters, and the old parameters are gone. Run the forward again."
            )
        if self._zeroed:
            self.sum.drop()
        upstream_engine.begin_backward_again(self._engine)
        self.sum.begin_backward_again()
        if self.residency is not None:
            self.residency.begin_backward_again()

    def zero_grad(self) -> None:
        """The user asked for zero gradients; it counts if a backward over the same forward follows.

        Everywhere else upstream's own meaning stays: a partition in the middle of a gradient
        accumulation is not cleared by ``engine.zero_grad()``.
        """
        self.recover()
        self._zeroed = True

    def flat_epilogue(self, wrapped: Callable[[], Any]) -> Any:
        """The reduction epilogue of stages 1 and 2; up to 0.18.4 it ends with a zero_grad()."""
        assert isinstance(self.sum, FlatSum)
        zeroed = self._zeroed
        result = self.sum.epilogue(wrapped)
        self._zeroed = zeroed
        return result

    def step_begins(self) -> None:
        """A boundary step is about to read the gradients."""
        self.recover()
        if self._dropped:
            raise RuntimeError(
                "engine.step() after a backward that raised: its gradients were dropped and none "
                "have come since. Run forward and backward again before the step."
            )

    def step_taken(self) -> None:
        """The optimizer has run at a boundary."""
        if not getattr(self._engine.optimizer, "overflow", False):
            self._steps += 1
        self._zeroed = False
        self.sum.step_taken()

    @contextmanager
    def dropping_what_raises(self) -> Iterator[None]:
        """Around ``engine.backward``: an exception after its graph was entered drops gradients."""
        begun = self._begun
        try:
            yield
        except BaseException:
            if self._begun != begun:
                self._drop_failed_backward()
            raise

    def recover(self) -> None:
        """Undo a plain ``loss.backward()`` that raised, at the next call that comes."""
        if self._watch.raised:
            self._drop_failed_backward()

    def _drop_failed_backward(self) -> None:
        self._watch.forget()
        self._dropped = True
        logger.warning(
            "A backward raised: every gradient reduced since the last optimizer step was dropped."
        )
        engines.forget_backward(self._engine)
        self.sum.abandon()
        if self.residency is not None:
            self.residency.abandon_backward()

    def detach(self) -> None:
        """Give the engine back to stock."""
        self._lost.detach()
        if self.residency is not None:
            self.residency.remove()
