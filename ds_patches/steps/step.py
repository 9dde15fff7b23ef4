"""The steps of an engine: which backwards belong to a step, and where its gradients go."""

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
    TaskWatch,
    accumulates,
    at_end_of_task,
    current_task_id,
)
from ds_patches.steps.state import Listener, Step, StepState, refuse_unseen_backward
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

_FOREIGN = (
    "This engine's backward began, and dropped the gradients that another engine's backward had "
    "added to its parameters, as a GAN's generator does to the discriminator. Call this engine's "
    "zero_grad() after such a backward, or its step() if the gradients are to be used."
)
_SECOND_FOREIGN = (
    "a second backward of another engine has reached this engine, and this DeepSpeed reduces the "
    "gradients of the first one only in a backward of this engine. Call zero_grad() of this engine "
    "after each backward of another one, or train both parts as one engine."
)
_NOT_STEPPED = (
    "Backwards of another engine have brought gradients to this engine %d times, and its step() "
    "was never called: it does not train. If one loss trains both engines, call step() of both: "
    "Accelerate's backward() steps only one engine, and the step() of its prepared optimizer does "
    "nothing. If this engine is not to train, freeze it by requires_grad_(False)."
)
_MIXED = (
    "a plain backward() of a tensor that is no output of the engine, after engine.backward() in "
    "the same step, added its gradients to unreduced ones: only one of the two is divided by the "
    "micro steps. Use engine.backward(tensor) for both."
)
_NO_BACKWARD = (
    "engine.step() at the gradient accumulation boundary, and no backward has reduced a gradient "
    "there: run a forward and engine.backward(loss) before each engine.step()."
)
_OLD_FORWARD = (
    "backward over a forward from before engine.step(): its gradients belong to parameters that "
    "the step has changed, where PyTorch would raise. Call step() after the last backward of a "
    "forward. Accelerate's backward() calls step(), also in its no_sync(): call the engine's "
    "no_sync() and backward() there."
)
#: After this many steps of a rival, such as a GAN's generator, an engine has usually stepped, too.
_MANY_STEPS = 4


class EngineSteps:
    """The steps and backwards of one engine.

    engine: a DeepSpeedEngine for which `upstream.coverage.why_not_covered` returns None.
    sum: the gradient sum for the engine's ZeRO stage.
    """

    def __init__(self, engine: Any, sum: GradientSum) -> None:
        self.sum = sum
        self.listeners: list[Listener] = []
        self.gather_once: Any = None  # the engine's GatherOnce, at stage 3
        #: The graph task of the running backward, and whether the last backward raised.
        self.watch = TaskWatch()
        #: Counts since the engine was tracked. A step that overflowed does not count.
        self.backwards_begun = self.steps_taken = 0
        #: True until DeepSpeed's prologue runs: once per backward, not once per forward.
        self.prologue_is_due = False
        self.engine: Any = engine  # None once detached: graphs may still have hooks
        #: The step since the last update of the parameters, and before the last backward.
        self.current_step = self._previous_step = Step()
        self._has_new_forward = False  # a forward has run since the last backward began
        #: True if DeepSpeed supports plain backwards, and divides them by the micro steps at
        #: outputs; here the sum divides instead.
        self.is_torch_style = upstream_engine.has_torch_style_backward(engine)
        has_hook_state = upstream_engine.hook_state(engine.optimizer) is not None
        #: True in 0.18.3 and 0.18.4, where the epilogue of a plain backward is deferred to its end.
        self.defers_epilogue = self.is_torch_style and not has_hook_state
        #: True if the epilogue is to run at the end of the backward. DeepSpeed asks for it in its
        #: gradient hooks, which stage 1 without `contiguous_gradients` does not register.
        self.epilogue_is_due = False
        #: The warnings that were logged. At stage 3 zero3_retain raises an error instead of one.
        self._warned = {_OLD_FORWARD} if engine.zero_optimization_partition_weights() else set()

    # --- Backwards ------------------------------------------------------------------------------

    def forward_ran(self, outputs: list[torch.Tensor]) -> None:
        """Register a hook on each output that has a graph, which begins a backward there."""
        self._has_new_forward = True
        # unserializable_hook: without it, pickling an output warns of its hook.
        hook = unserializable_hook(partial(self.enter_backward, steps_before=self.steps_taken))  # type: ignore[no-untyped-call]
        for tensor in outputs:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def enter_backward(
        self, grad: Any = None, *, steps_before: int | None = None, is_backward: bool = False
    ) -> None:
        """Called when a gradient reaches an engine output.

        The first call in a graph task begins a backward, or a nested one if another is running.

        steps_before: `steps_taken` at the output's forward, if it is known.
        is_backward: the task is known to be a backward; else it may be ``torch.autograd.grad``.
        """
        if self.engine is None:
            return
        is_old = steps_before not in (None, self.steps_taken)
        if is_old and _OLD_FORWARD not in self._warned and accumulates():
            self._warn_once(_OLD_FORWARD)
        watch = self.watch
        if watch.task_id == current_task_id() or not (is_backward or accumulates()):
            return
        if watch.task_id is not None:  # the last backward has not ended, or raised
            if watch.running:
                for listener in self.listeners:
                    listener.backward_nested()
                return
            self.drop_failed_backward()
        watch.begin()
        self.backwards_begun += 1
        caller: Any = engine_backwards[-1] if engine_backwards else None
        is_own = caller is self.engine
        if self.current_step.is_foreign and is_own:
            self.current_step = Step()
            self.sum.drop()
            self._warn_once(_FOREIGN)
        self._previous_step = self.current_step
        is_foreign = caller is not None and not is_own
        if is_foreign and self.current_step.is_foreign:
            # Up to 0.18.2, only an epilogue of this engine makes room for more gradients.
            if not self.is_torch_style and self.engine.zero_optimization_stage() == 2:
                raise Refused(_SECOND_FOREIGN)
            if _NOT_STEPPED not in self._warned:
                self._warn_of_no_step()
        self.current_step = self.current_step.after_backward(self.engine.micro_steps, is_foreign)
        same_forward, self._has_new_forward = not self._has_new_forward, False
        if self.defers_epilogue:
            self.epilogue_is_due = not upstream_engine.has_gradient_hooks(self.engine.optimizer)
            at_end_of_task(self._run_epilogue)
        self.prologue_is_due = True
        upstream_engine.begin_backward(self.engine, same_forward)
        is_held = self._previous_step.state is StepState.HELD
        self.sum.reinstall_layers()
        self.sum.set_divisor(divisor_of(self.engine), is_held)
        self.sum.begin_backward()
        if is_held and self.sum.holds_local and upstream_engine.saw_gradients(self.engine) is None:
            self.sum.record_gradients()
        for listener in self.listeners:
            if listener.awaits_backwards:
                listener.backward_begins(same_forward)

    def _run_epilogue(self) -> None:
        """Run the epilogue of a plain backward, if DeepSpeed has asked for it."""
        if self.engine is not None and self.epilogue_is_due:
            upstream_engine.end_plain_backward(self.engine)

    def _warn_of_no_step(self) -> None:
        """Warn once if only other engines bring gradients, and step() was never called."""
        engine = self.engine
        is_early = self.backwards_begun <= _MANY_STEPS * engine.gradient_accumulation_steps()
        if engine.micro_steps or is_early:  # step() was called if `micro_steps` is not 0
            return
        if any(param.requires_grad for param in engine.module.parameters()):
            self._warn_once(_NOT_STEPPED, self.backwards_begun - 1)
        self._warned.add(_NOT_STEPPED)  # also if it is frozen: its parameters are asked once

    def _warn_once(self, message: str, *args: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)

    def enter_at_parameter(self) -> None:
        """Called when a gradient reaches a parameter, and has reached no output before.

        Raises Refused if it was added to a local gradient with another divisor.
        """
        is_mixed = divisor_of(self.engine) != self.sum.divisor
        if is_mixed and self.sum.holds_local and self.current_step.state is StepState.HELD:
            raise Refused(_MIXED)
        self.enter_backward(is_backward=True)

    def running_divisor(self) -> int:
        """Return the divisor for gradients of the running backward."""
        return self.sum.divisor if self.watch.running else 1

    def end_empty_backward(self) -> bool:
        """End a backward that reached no parameter of this engine.

        Return True to skip DeepSpeed's epilogue.
        """
        self.current_step = self._previous_step
        return self.sum.end_empty_backward()

    def recover(self) -> None:
        """Drop a plain ``loss.backward()`` that raised, at the next call of the engine.

        A device thread of autograd may keep the raised task alive, as if it ran. But a call outside
        of all graph tasks comes after its end.
        """
        watch = self.watch
        if watch.task_id is not None and (watch.raised or current_task_id() == NO_TASK):
            self.drop_failed_backward()

    def drop_failed_backward(self) -> None:
        """Drop the step's gradients after a backward raised, if it has brought any."""
        self.watch.clear_failure()
        has_gradients = upstream_engine.saw_gradients(self.engine)
        if has_gradients is None:  # DeepSpeed does not count them
            has_gradients = self.sum.may_have_gradients()
        # Without gradients the step is kept: the backward may have failed on a freed graph.
        keeps_step = self._previous_step.state is StepState.HELD and not has_gradients
        self.current_step = self._previous_step if keeps_step else Step(StepState.FAILED)
        if has_gradients:
            logger.warning(
                "A backward raised: every gradient reduced since the last optimizer step was "
                "dropped."
            )
        upstream_engine.reset_backward(self.engine)
        if keeps_step:
            self.sum.end_empty_backward(failed=True)
        else:
            self.sum.drop_failed_backward()
        for listener in self.listeners:
            listener.backward_raised()
            if not keeps_step:
                listener.gradients_dropped(failed=True)

    # --- Steps ----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the step's gradients, as the user asked for zero gradients.

        Right after ``engine.step()`` has counted a micro step it drops nothing, as in DeepSpeed:
        PyTorch loops begin each micro step with zero_grad(), and expect DeepSpeed to accumulate.
        """
        if self.sum.in_upstream_zero_grad:
            return
        self.recover()
        step, micro_step = self.current_step, self.engine.micro_steps
        if step.state is not StepState.HELD or (
            self.sum.keeps_earlier_micro_steps and step.last != micro_step
        ):
            return
        # DeepSpeed itself drops the gradients of a single micro step, without a warning.
        if step.first < step.last == micro_step:
            self._warn_once(
                "zero_grad() in the middle of a gradient accumulation: as in PyTorch, the "
                "gradients of earlier micro steps are dropped, too."
            )
        self.current_step = Step()
        self.sum.drop()
        for listener in self.listeners:
            listener.gradients_dropped(failed=False)

    def end_empty_block(self) -> None:
        """Allow the step without gradients, after a block that brought none on any rank."""
        self.current_step = Step()
        self.sum.takes_zeros = True

    def resume_after_block(self, previous_step: Step) -> None:
        """Continue `previous_step` after a block in it raised and dropped its gradients.

        The step is HELD if earlier micro steps have gradients, else FAILED. It has a backward in
        the current micro step, so that a following zero_grad() drops the step.
        """
        held = previous_step.state is StepState.HELD and self.sum.keeps_earlier_micro_steps
        micro_step = self.engine.micro_steps
        self.current_step = (
            previous_step.after_backward(micro_step) if held else Step(StepState.FAILED)
        )

    def step(self, run: Callable[[], Any]) -> Any:
        """Take the optimizer's step at the boundary, by `run`.

        Raises Refused if the step has no gradients, or lacks some.
        """
        self.recover()
        if self.current_step.state is StepState.FAILED:
            raise Refused(
                "engine.step() after a backward or a block raised: the gradients were dropped, and "
                "none have arrived since. Run forward and backward again before the step."
            )
        is_new = not self.current_step.has_backward_in(self.engine.micro_steps)
        if is_new:
            refuse_unseen_backward(self.engine)
        if self.sum.lacks_gradients(is_new and self.current_step.state is StepState.HELD):
            raise Refused(_NO_BACKWARD)
        if self.backwards_begun or self.sum.takes_zeros:
            self.sum.complete()
        self.sum.in_upstream_zero_grad = True
        try:
            result = run()
        finally:
            self.sum.in_upstream_zero_grad = False
        if not getattr(self.engine.optimizer, "overflow", False):
            self.steps_taken += 1
        self.current_step = Step()
        self.sum.step_taken()
        return result

    def detach(self) -> None:
        """Stop tracking the engine."""
        self.engine = None
        self.sum.detach()
        self.listeners.clear()
