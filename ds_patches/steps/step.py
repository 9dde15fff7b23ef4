"""The steps of one engine: which backwards belong to one, and what becomes of their gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from ds_patches.core.errors import Refused
from ds_patches.steps.division import divisor_of, engine_backwards
from ds_patches.steps.graph_task import (
    NO_TASK,
    Entry,
    TaskWatch,
    accumulates,
    at_end_of_task,
    current_task_id,
)
from ds_patches.steps.listener import Listener
from ds_patches.steps.state import Step, StepState
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

_NO_OUTPUT = (
    "backward() of a tensor that is no output of the engine: call engine.backward(tensor) instead; "
    "DeepSpeed does not know of this one"
)
_FOREIGN = (
    "This engine's backward began, and dropped the gradients that another engine's backward had "
    "brought to its parameters, as a GAN's generator does to the discriminator. Call this engine's "
    "zero_grad() after such a backward, or, if the gradients are to count, its step()."
)
_NOT_STEPPED = (
    "Backwards of another engine have brought gradients to this engine %d times, and its step() "
    "was never called: it does not train. If one loss trains both engines, call step() of both: "
    "Accelerate's backward() steps one engine alone, and the step() of what it has prepared does "
    "nothing. If this one is not to train, freeze it by requires_grad_(False)."
)
_MIXED = (
    "a plain backward() of a tensor that is no output of the engine, after engine.backward() in a "
    "step whose gradients stay on the parameters: one is divided by the micro steps, the other is "
    "not. Use engine.backward(tensor) for both."
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


#: In this many steps of another engine, a generator's say, its rival has usually had one as well.
_MANY = 4


def refuse_missed(engine: Any) -> None:
    """Raise Refused if parameters got gradients, and DeepSpeed saw no backward begin."""
    state = upstream_engine.hook_state(engine.optimizer)
    # The hooks of parameters ask for a backward if the forward has had another before.
    if state and state.hooks_fired_this_backward and not state.backward_seen_this_step:
        raise Refused(f"engine.step() after a {_NO_OUTPUT}, and has reduced no gradient.")


class EngineSteps:
    """The steps and backwards of one engine.

    engine: a DeepSpeedEngine that `upstream.coverage.why_not_covered` lets pass.
    sum: of the gradients of a step, by the engine's ZeRO stage.
    """

    def __init__(self, engine: Any, sum: GradientSum) -> None:
        self.sum = sum
        self.listeners: list[Listener] = []
        self.gather_once: Any = None  # at stage 3, what `steps.gather_once` made of the engine
        #: The backward that runs, and how the last one ended.
        self.watch = TaskWatch()
        #: Never reset. A step that overflowed was not taken.
        self.backwards_begun = self.steps_taken = 0
        #: Upstream's hooks ask for the prologue once per forward: it runs once per backward.
        self.prologue_is_due = False
        self.engine: Any = engine  # None: it was given back, and graphs have hooks of ours
        self._step = self._before = Step()  # now, and before the last backward began
        self._fresh = False  # a forward has run since the last backward began
        #: In 0.18.3 and 0.18.4, whether DeepSpeed has asked for the epilogue of a plain backward,
        #: which runs as that ends.
        is_torch_style = upstream_engine.has_torch_style_backward(engine)
        self.ends_late = is_torch_style and upstream_engine.hook_state(engine.optimizer) is None
        self.epilogue_is_due = False
        #: Whether DeepSpeed divides plain backwards, at outputs, which the sum does here.
        self.divides = is_torch_style
        self._warned = False
        self._warned_of_foreign = self._warned_of_no_step = False
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
        caller: Any = engine_backwards[-1] if engine_backwards else None
        is_own = caller is self.engine
        if self._step.is_foreign and is_own:
            self._drop_foreign()
        self._before = self._step
        is_foreign = caller is not None and not is_own
        if is_foreign and self._step.is_foreign and not self._warned_of_no_step:
            self._warn_of_no_step()
        self._step = self._step.after_backward(self.engine.micro_steps, is_foreign)
        again, self._fresh = not self._fresh, False
        self.prologue_is_due = True
        if self.ends_late:
            self.epilogue_is_due = False
            at_end_of_task(self._run_epilogue)
        try:
            upstream_engine.begin_backward(self.engine, again)
        finally:
            self.prologue_is_due = False
        for at, layer in enumerate(self.sum.layers):  # without a call for each
            if layer.own.get(layer.name) is not layer.installed:
                self.sum.put_back(at)
        if (divisor := divisor_of(self.engine)) != self.sum.divisor:
            self.sum.expect(divisor, self._before.state is not StepState.HELD)
        self.sum.begin_backward()
        is_held = self._before.state is StepState.HELD
        if is_held and self.sum.holds_local and upstream_engine.saw_gradients(self.engine) is None:
            self.sum.note()
        for listener in self.listeners:
            if listener.awaits_backwards:
                listener.backward_begins(again)

    def _run_epilogue(self) -> None:
        """Run the epilogue of a plain backward, if DeepSpeed has asked for one."""
        if self.engine is not None and self.epilogue_is_due:
            self.epilogue_is_due = False
            upstream_engine.end_plain_backward(self.engine)

    def _drop_foreign(self) -> None:
        """Drop what the backwards of other engines have brought, as ``engine.backward`` begins."""
        self._step = Step()
        self.sum.drop()
        if not self._warned_of_foreign:
            self._warned_of_foreign = True
            logger.warning(_FOREIGN)

    def _warn_of_no_step(self) -> None:
        """Warn once if other engines' gradients have come for some steps, and none was taken."""
        engine = self.engine
        is_early = self.backwards_begun <= _MANY * engine.gradient_accumulation_steps()
        if engine.micro_steps or is_early:  # `micro_steps` counts the calls of step()
            return
        self._warned_of_no_step = True
        if any(param.requires_grad for param in engine.module.parameters()):
            logger.warning(_NOT_STEPPED, self.backwards_begun - 1)

    def parameter_entered(self) -> None:
        """A gradient has come to a parameter, and to no output before.

        Raises Refused if it has been added to a local one that was divided already, or was not.
        """
        is_mixed = divisor_of(self.engine) != self.sum.divisor
        if is_mixed and self.sum.holds_local and self._step.state is StepState.HELD:
            raise Refused(_MIXED)
        self.entered(is_backward=True)

    def divisor_now(self) -> int:
        """Return by how much gradients of the running backward are still to be divided."""
        return self.sum.divisor if self.watch.running else 1

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
        came = upstream_engine.saw_gradients(self.engine)
        may_have_come = self.sum.has_come() if came is None else came
        # It may have run over a graph that was freed.
        spares = self._before.state is StepState.HELD and not may_have_come
        self._step = self._before if spares else Step(StepState.FAILED)
        if may_have_come:
            logger.warning(
                "A backward raised: every gradient reduced since the last optimizer step was "
                "dropped."
            )
        upstream_engine.reset_backward(self.engine)
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
        if is_new:
            refuse_missed(self.engine)
        if self.sum.lacks(is_new and self._step.state is StepState.HELD):
            raise Refused(_NO_BACKWARD)
        if self.backwards_begun:
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
