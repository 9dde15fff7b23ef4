"""The steps of one engine: which backwards belong to one, and what becomes of their gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import (
    NO_TASK,
    Entry,
    TaskWatch,
    accumulates,
    current_task_id,
)
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

_NO_OUTPUT = (
    "backward() of a tensor that is no output of the engine: call engine.backward(tensor) instead; "
    "DeepSpeed does not know of this one"
)
_NO_BACKWARD = (
    "engine.step() at the gradient accumulation boundary, and no backward has reduced a gradient "
    "there: run forward and engine.backward(loss) before each engine.step()."
)
_OLD_FORWARD = (
    "backward over a forward from before engine.step(): its gradients are of parameters that are "
    "no more, where PyTorch would raise. Step after the last backward of a forward. Accelerate's "
    "backward() steps at once, also in its no_sync(): call the engine's no_sync() and backward() "
    "there."
)


class StepState(Enum):
    """What the backwards since the last ``engine.step()`` have left."""

    #: No gradient: there was no backward, or the user has dropped what it brought.
    EMPTY = auto()
    #: Gradients.
    HELD = auto()
    #: No gradient: the last backward raised, and took those of the others with it.
    FAILED = auto()


@dataclass(frozen=True)
class Step:
    """One step of an engine, from one update of its parameters to the next.

    first, last: while it is HELD, the numbers of the micro steps that its first and its last
        backward were in, as ``engine.micro_steps`` counts them.
    """

    state: StepState = StepState.EMPTY
    first: int = -1
    last: int = -1

    def after_backward(self, micro_step: int) -> Step:
        """Return the step with one more backward, in this micro step."""
        first = self.first if self.state is StepState.HELD else micro_step
        return Step(StepState.HELD, first, micro_step)

    def has_backward_in(self, micro_step: int) -> bool:
        """Whether its last backward was in this micro step."""
        return self.state is StepState.HELD and self.last == micro_step


class Listener:
    """What a patch does at an engine's backwards. A method does nothing unless overridden."""

    #: Whether `backward_begins` is to be called.
    awaits_backwards = True

    def backward_begins(self, again: bool) -> None:
        """A backward begins; its graph task runs. `again`: no forward has run since the last."""

    def backward_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs ``engine.backward(loss)``: `run`, or something around it."""
        return run

    def backward_nested(self) -> None:
        """A backward over a forward of the engine begins inside the running one."""

    def backward_raised(self) -> None:
        """A backward raised; whether `dropped` follows depends on what it had brought."""

    def dropped(self, failed: bool) -> None:
        """The step's gradients were dropped: by the user, or because a backward `failed`."""


class EngineSteps:
    """The steps and backwards of one engine.

    engine: a DeepSpeedEngine that `upstream.engine.why_not_covered` lets pass.
    sum: of the gradients of a step, by the engine's ZeRO stage.
    """

    def __init__(self, engine: Any, sum: GradientSum) -> None:
        self.sum = sum
        self.listeners: list[Listener] = []
        #: The backward that runs, and how the last one ended.
        self.watch = TaskWatch()
        #: Never reset. A step that overflowed was not taken.
        self.backwards_begun = self.steps_taken = 0
        #: ``engine.backward`` runs, of a loss that has a graph.
        self.in_engine_backward = False
        #: Upstream's hooks ask for the prologue once per forward: it runs once per backward.
        self.prologue_is_due = False
        self.engine: Any = engine  # None: it was given back, and graphs have hooks of ours
        self._step = self._before = Step()  # now, and before the last backward began
        self._fresh = False  # a forward has run since the last backward began
        self._warned = False
        # At stage 3 zero3_retain raises, and needs no warning.
        self._warned_of_old = engine.zero_optimization_partition_weights()

    # --- Backwards ------------------------------------------------------------------------------

    def forward_ran(self, outputs: list[torch.Tensor]) -> None:
        """Watch for the backwards over a forward, by its outputs that have graphs."""
        self._fresh = True
        # Who pickles an output is not to be warned of it.
        hook = unserializable_hook(partial(self.entered, after=self.steps_taken))  # type: ignore[no-untyped-call]
        for tensor in outputs:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def entered(
        self, grad: Any = None, *, after: int | None = None, is_backward: bool = False
    ) -> None:
        """A gradient has come to an output: the first time in a graph task, a backward begins.

        after: how many steps were taken before its forward, if that is known.
        is_backward: whether that is known; else ``torch.autograd.grad`` may run, which is none.
        """
        if self.engine is None:
            return
        if after not in (None, self.steps_taken) and not self._warned_of_old and accumulates():
            self._warned_of_old = True
            logger.warning(_OLD_FORWARD)
        watch = self.watch
        if watch.task_id == current_task_id() or not (is_backward or accumulates()):
            return
        entry = watch.enter()
        if entry is Entry.AFTER_FAILURE:
            self.drop_failed_backward()
            entry = watch.enter()
        if entry is Entry.NESTED:
            for listener in self.listeners:
                listener.backward_nested()
            return
        self.backwards_begun += 1
        self._before = self._step
        self._step = self._step.after_backward(self.engine.micro_steps)
        again, self._fresh = not self._fresh, False
        self.prologue_is_due = True
        try:
            upstream_engine.begin_backward(self.engine, again)
        finally:
            self.prologue_is_due = False
        for at, layer in enumerate(self.sum.layers):  # without a call for each
            if layer.own.get(layer.name) is not layer.installed:
                self.sum.put_back(at)
        self.sum.begin_backward()
        for listener in self.listeners:
            if listener.awaits_backwards:
                listener.backward_begins(again)

    def parameter_entered(self) -> None:
        """A gradient has come to a parameter, and to no output before."""
        if self.engine.gradient_accumulation_steps() > 1:
            raise Refused(f"{_NO_OUTPUT}, and does not divide it by the micro steps either.")
        self.entered(is_backward=True)

    def passed_by(self) -> bool:
        """End a backward that has reached no parameter of this engine, but of another.

        Return whether to skip DeepSpeed's epilogue.
        """
        self._step = self._before
        return self.sum.pass_by()

    def recover(self) -> None:
        """Undo a plain ``loss.backward()`` that raised, at the next call that comes.

        A device's thread may hold what raised until its next work, as if it ran. But a call from
        outside of all graph tasks comes behind it.
        """
        if self.watch.raised or (self.watch.running and current_task_id() == NO_TASK):
            self.drop_failed_backward()

    def drop_failed_backward(self) -> None:
        """The last backward raised, and the step's gradients go with it, if it has brought any."""
        self.watch.forget()
        may_have_come = upstream_engine.may_have_come(self.engine)
        # It may have run over a graph that was freed.
        spares = self._before.state is StepState.HELD and not may_have_come
        self._step = self._before if spares else Step(StepState.FAILED)
        if may_have_come:
            logger.warning(
                "A backward raised: every gradient reduced since the last optimizer step was "
                "dropped."
            )
        upstream_engine.forget_backward(self.engine)
        if spares:
            self.sum.spare()
        else:
            self.sum.abandon()
        for listener in self.listeners:
            listener.backward_raised()
            if not spares:
                listener.dropped(failed=True)

    # --- Steps ----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """The user asked for zero gradients: what this step has reduced is forgotten.

        Loops from PyTorch begin each micro step with it, and mean DeepSpeed to accumulate: that
        drops nothing, where upstream's does not. A backward since then is one to be dropped.
        """
        if self.sum.upstream_zeroes:
            return
        self.recover()
        step, now = self._step, self.engine.micro_steps
        if step.state is not StepState.HELD or (
            self.sum.keeps_earlier_micro_steps and step.last != now
        ):
            return
        if step.first < step.last == now and not self._warned:  # else upstream does it, too
            self._warned = True
            logger.warning(
                "zero_grad() in the middle of a gradient accumulation: as in PyTorch, the micro "
                "steps that engine.step() has counted are dropped, too."
            )
        self._step = Step()
        self.sum.drop()
        for listener in self.listeners:
            listener.dropped(failed=False)

    @property
    def present(self) -> Step:
        """What the backwards since the last step have left."""
        return self._step

    def back_to(self, before: Step) -> None:
        """Go on from `before` a block that raised, whose gradients were dropped.

        The step is HELD if gradients of earlier micro steps are left, else FAILED. The block was
        in this micro step: a zero_grad() that follows means to drop the rest.
        """
        held = before.state is StepState.HELD and self.sum.keeps_earlier_micro_steps
        micro_step = self.engine.micro_steps
        self._step = before.after_backward(micro_step) if held else Step(StepState.FAILED)

    def step(self, run: Callable[[], Any]) -> Any:
        """Take the optimizer's step at the boundary, by `run`.

        Raises Refused where the step has no gradients, or lacks some.
        """
        self.recover()
        if self._step.state is StepState.FAILED:
            raise Refused(
                "engine.step() after a backward, or a block, that raised: its gradients were "
                "dropped, and none have come since. Run forward and backward again before the step."
            )
        is_new = not self._step.has_backward_in(self.engine.micro_steps)
        if is_new and upstream_engine.missed_backward(self.engine.optimizer):
            raise Refused(f"engine.step() after a {_NO_OUTPUT}, and has reduced no gradient.")
        if self.backwards_begun:
            if self.sum.lacks(is_new and self._step.state is StepState.HELD):
                raise Refused(_NO_BACKWARD)
            self.sum.complete()
        self.sum.upstream_zeroes = True
        try:
            result = run()
        finally:
            self.sum.upstream_zeroes = False
        if not getattr(self.engine.optimizer, "overflow", False):
            self.steps_taken += 1
        self._step = Step()
        self.sum.step_taken()
        return result

    def detach(self) -> None:
        """Give the engine back to stock."""
        self.engine = None
        self.sum.detach()
        self.listeners.clear()
