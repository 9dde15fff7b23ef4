"""The steps of one engine: which backwards belong to one, and what becomes of their gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_patches.runtime import engines
from ds_patches.runtime.graph_task import Entry, TaskWatch, accumulates

from . import outputs
from .flat_sum import FlatSum
from .gradient_sum import GradientSum
from .master_sum import MasterSum
from .partition_sum import PartitionSum
from .upstream import engine as upstream_engine
from .upstream import flat

logger = logging.getLogger("ds_patches.accumulation")


_NO_OUTPUT = (
    "backward() of a tensor that is no output of the engine: call engine.backward(tensor) instead; "
    "DeepSpeed does not know of this one"
)
_OLD_FORWARD = (
    "backward over a forward from before engine.step(): its gradients are of parameters that are "
    "no more, where PyTorch would raise. Step after the last backward of a forward. Accelerate's "
    "backward() steps at once, also in its no_sync(): call the engine's no_sync() and backward() "
    "there."
)


class Listener:
    """What another patch does at the backwards of an engine: nothing, but for what it defines."""

    def backward_begins(self, again: bool) -> None:
        """Inside its graph task. `again`: no forward has run since the one before."""

    def backward_nested(self) -> None:
        """One over a forward of the engine begins inside the one that is running."""

    def dropped(self, failed: bool) -> None:
        """The gradients of the step were, by the user or because a backward `failed`."""


class EngineSteps:
    """What there is to know of one engine between its backwards.

    engine: a DeepSpeedEngine that `upstream.engine.why_not_covered` lets pass.
    """

    def __init__(self, engine: Any) -> None:
        self.listeners: list[Listener] = []
        #: Steps that changed parameters.
        self.count = 0
        #: In a backward whose loss was divided by the micro steps: outputs need not do it.
        self.has_divided = False
        self.sum: GradientSum = _sum_of(engine)
        self._engine = engine
        self.watch = TaskWatch()
        self._begun = 0  # backwards, ever
        #: Of this step's backwards, the first and the last: in which micro step they were.
        self._micro_steps: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None  # the same, before the last backward
        self._fresh = False  # a forward has run since the last backward
        #: Upstream's, whose hooks ask for it once per forward: it runs once per backward.
        self.prologue_is_due = False
        self._dropped = False  # the last backward raised
        self._own_zero_grad = False  # upstream calls zero_grad() by itself
        self._warned = False
        self._warned_of_old = isinstance(self.sum, PartitionSum)  # which has to raise there

    # --- Backwards ------------------------------------------------------------------------------

    def forward_ran(self, result: Any) -> None:
        """Watch for the backwards over a forward, by its outputs."""
        self._fresh = True
        outputs.watch(result, partial(self.output_entered, after=self.count))

    def output_entered(self, grad: Any = None, after: int | None = None) -> None:
        """A gradient has come to an output; ``torch.autograd.grad`` is no backward.

        after: so many steps its forward ran, if that is known.
        """
        if after not in (None, self.count) and not self._warned_of_old and accumulates():
            self._warned_of_old = True
            logger.warning(_OLD_FORWARD)
        if not self.watch.runs_here and accumulates():
            self._backward_entered()

    def parameter_entered(self) -> None:
        """A gradient has come to a parameter, and to no output before."""
        if self._engine.gradient_accumulation_steps() > 1:
            raise RuntimeError(f"{_NO_OUTPUT}, and does not divide it by the micro steps either.")
        self._backward_entered()

    def _backward_entered(self, grad: torch.Tensor | None = None) -> None:
        """From inside a graph task of this engine; the first time there, a backward begins."""
        entry = self.watch.enter()
        if entry is Entry.RUNS:
            return
        if entry is Entry.AFTER_FAILURE:
            self._drop_failed_backward()
            entry = self.watch.enter()
        if entry is Entry.BEGINS:
            self._backward_begins()
        else:
            for listener in self.listeners:
                listener.backward_nested()

    def _backward_begins(self) -> None:
        self._begun += 1
        now = self._engine.micro_steps
        self._before = self._micro_steps
        self._micro_steps = (self._micro_steps[0] if self._micro_steps else now, now)
        again, self._fresh, self._dropped = not self._fresh, False, False
        self.prologue_is_due = True
        upstream_engine.begin_backward(self._engine, again)
        self.prologue_is_due = False
        self.sum.begin_backward()
        for listener in self.listeners:
            listener.backward_begins(again)

    def post_hook(self, wrapped: Callable[[], None]) -> None:
        """Upstream's, with the epilogue; one inside another leaves it to the outer one.

        One that has come to none of the parameters was on its way to those of another engine.
        """
        if self.watch.running and not self.watch.runs_here:
            return
        passed_by = upstream_engine.reached_no_parameter(self._engine)
        if passed_by:
            self._micro_steps = self._before
        if passed_by and isinstance(self.sum, FlatSum):
            self.sum.pass_by()
            self._engine.optimizer.exit_backward()
        else:
            wrapped()

    def backward(
        self, loss: torch.Tensor, run: Callable[..., Any], *args: Any, **given: Any
    ) -> Any:
        """Around ``engine.backward``, which `run` is.

        What the loss is a function of does not matter, so that any tensor may have a backward.
        """
        if not loss.requires_grad:
            return run(loss, *args, **given)  # for upstream to refuse
        if loss.grad_fn is None or loss._backward_hooks:  # which are to come after ours
            loss = loss.view_as(loss)
        begun = self._begun
        handle = loss.register_hook(self._backward_entered)  # type: ignore[no-untyped-call]
        try:
            return run(loss, *args, **given)
        except BaseException:
            if self._begun != begun:
                self._drop_failed_backward()
            raise
        finally:
            handle.remove()

    def recover(self) -> None:
        """Undo a plain ``loss.backward()`` that raised, at the next call that comes."""
        if self.watch.raised:
            self._drop_failed_backward()

    def _drop_failed_backward(self) -> None:
        self.watch.forget()
        self._dropped = True
        self._micro_steps = None
        if self._before is not None or upstream_engine.may_have_come(self._engine):
            logger.warning(
                "A backward raised: every gradient reduced since the last optimizer step was "
                "dropped."
            )
        engines.forget_backward(self._engine)
        self.sum.abandon()
        for listener in self.listeners:
            listener.dropped(failed=True)

    # --- Steps ----------------------------------------------------------------------------------

    @property
    def _begun_here(self) -> bool:
        """Whether a backward was, in this micro step."""
        return self._micro_steps is not None and self._micro_steps[1] == self._engine.micro_steps

    def zero_grad(self) -> None:
        """The user asked for zero gradients: what this step has reduced is forgotten.

        Between micro steps nothing is: loops from PyTorch begin each with ``zero_grad()``, and mean
        DeepSpeed to accumulate. A backward since then is one to be dropped, and with it the sum.
        """
        if self._own_zero_grad:
            return
        self.recover()
        if self._micro_steps is None or not self._begun_here:
            return
        if self._micro_steps[0] != self._micro_steps[1] and not self._warned:
            self._warned = True
            logger.warning(
                "zero_grad() after a backward, in the middle of a gradient accumulation: as in "
                "PyTorch, the micro steps that engine.step() has counted are dropped, too."
            )
        self._micro_steps = None
        self.sum.drop()
        for listener in self.listeners:
            listener.dropped(failed=False)

    def step(self, run: Callable[[], Any]) -> Any:
        """Around the optimizer's step, at the boundary, which `run` takes."""
        self.recover()
        if self._dropped:
            raise RuntimeError(
                "engine.step() after a backward that raised: its gradients were dropped and none "
                "have come since. Run forward and backward again before the step."
            )
        if not self._begun_here and upstream_engine.was_not_entered(self._engine.optimizer):
            raise RuntimeError(f"engine.step() after a {_NO_OUTPUT}, and has reduced no gradient.")
        if self._begun:  # else its gradients are from before we knew of it
            self.sum.complete()
        self._own_zero_grad = True
        try:
            result = run()
        finally:
            self._own_zero_grad = False
        if not getattr(self._engine.optimizer, "overflow", False):
            self.count += 1
        self._micro_steps = None
        self.sum.step_taken()
        return result

    def epilogue(self, wrapped: Callable[[], Any]) -> Any:
        """Upstream's of stages 1 and 2, which up to 0.18.4 ends with a ``zero_grad()``."""
        assert isinstance(self.sum, FlatSum)
        self._own_zero_grad, before = True, self._own_zero_grad
        try:
            return self.sum.epilogue(wrapped)
        finally:
            self._own_zero_grad = before

    def detach(self) -> None:
        """Give the engine back to stock."""
        self.sum.detach()
        self.listeners.clear()


def _sum_of(engine: Any) -> GradientSum:
    if engine.zero_optimization_partition_weights():
        return PartitionSum(engine.optimizer)
    if flat.keeps_its_own_sum(engine.optimizer):
        return MasterSum(engine)
    return FlatSum(engine)
