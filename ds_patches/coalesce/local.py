"""The gradients of an engine that stay on their parameters: in a block, or in ``no_sync()``."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ds_patches.core import lifecycle
from ds_patches.core.agreement import reduction_group
from ds_patches.core.calls import Args, Kwargs, Wrapped, meanwhile
from ds_patches.core.errors import Misused, Refused
from ds_patches.core.layer import Layer
from ds_patches.steps import gather_once
from ds_patches.steps.division import engine_backwards
from ds_patches.steps.gather_once import GatherOnce
from ds_patches.steps.graph_task import current_task_id
from ds_patches.steps.state import Listener, StepState
from ds_patches.steps.step import EngineSteps
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.coalesce")

_RAISED = (
    "A coalesce_grad_reduction() block raised: its gradients were dropped, and at ZeRO 1 those of "
    "the step's earlier micro steps, which are summed in the same place."
)
_UNSCALED = (
    "backward() of a tensor in fp16: this DeepSpeed scales a loss in engine.backward() alone. Call "
    "engine.backward(tensor) instead."
)


class LocalGradients(Listener):
    """The unreduced gradients of one engine's backwards, on their parameters.

    While they stay there autograd adds them up, and nothing is reduced: the methods of this engine
    that would reduce them are wrapped. At all other times there are no wrappers.
    """

    awaits_backwards = False  # True while gradients stay

    def __init__(self, engine: Any, steps: EngineSteps) -> None:
        self.sum, self._group = steps.sum, reduction_group(engine)
        #: True while a block, or ``no_sync()``, is open.
        self.in_block = self.in_no_sync = False
        #: True if a backward has raised since a block was opened.
        self.failed = False
        self._engine, self._steps = engine, steps
        self._layers: list[Layer] = []
        #: True if a backward has begun since `begin`.
        self.has_backward = False
        #: Without it each backward reduces at stages 2 and 3, and the step at stage 1.
        self._is_managed = upstream_boundary.manages_boundary(engine)
        partitions = engine.zero_optimization_partition_gradients()
        self._reduces_in_backward = partitions and not self._is_managed

    def begin(self) -> None:
        """Keep gradients on their parameters from here on."""
        if self._layers:
            return
        engine, optimizer = self._engine, self._engine.optimizer
        upstream_engine.clear_last_step(engine)
        self.sum.begin_local()
        method = upstream_engine.gradient_method(optimizer)
        self._layers = [
            Layer(optimizer, method, self._around_gradient),
            Layer(engine, "allreduce_gradients", self._around_allreduce),
            Layer(engine, "step", self._around_step),
        ]
        if not self._steps.is_torch_style:
            self._layers.append(Layer(engine, "backward", self._around_backward))
        self.awaits_backwards = True

    def end(self) -> None:
        """Remove the wrappers: DeepSpeed reduces gradients again."""
        for layer in self._layers:
            layer.remove()
        self._layers = []
        self.sum.end_local()
        self.has_backward = self.awaits_backwards = False

    def reduce(self) -> bool:
        """Reduce the local gradients into the step's sum. Collective.

        Also end the sum of earlier micro steps that no backward at the boundary ends. Return False
        if there is nothing to reduce.
        """
        had_backward = self.has_backward
        self.end()
        missing = self.sum.missing_params(self._group)
        is_held = self._steps.current_step.state is StepState.HELD
        if missing is None and not (is_held and self.sum.lacks_gradients(has_unreduced=False)):
            return False
        if not had_backward:  # but another rank has
            self.sum.begin_backward()
        boundary = upstream_boundary.at_boundary(self._engine)
        with nullcontext() if self._reduces_in_backward else boundary:
            self.sum.reduce_local(missing or set())
        return True

    # --- Called by `accumulation` at the engine's backwards ---------------------------------------

    def backward_begins(self, same_forward: bool) -> None:
        """Note that a backward has begun. Raises Refused if its loss is fp16 and not scaled."""
        is_plain = self._engine not in engine_backwards
        if is_plain and self._engine.fp16_enabled() and not self._steps.is_torch_style:
            raise Refused(_UNSCALED)
        self._note_backward()

    def backward_nested(self) -> None:
        """Keep gradients local, so that the outer backward ends with one reduction.

        Not if some of its gradients are being reduced already: then all are reduced as they arrive.
        """
        if self._layers or not self.sum.has_nonlocal_gradients():
            self.begin()
            self._note_backward()

    def _note_backward(self) -> None:
        self.has_backward = True
        self.sum.record_trainable()

    def gradients_dropped(self, failed: bool) -> None:
        """Clear the notes of backwards whose gradients were dropped."""
        self.failed |= failed
        if self.in_block or self.in_no_sync:
            self.has_backward = False
        else:
            self.end()

    # --- coalesce_grad_reduction() ----------------------------------------------------------------

    @contextmanager
    def block(self) -> Iterator[None]:
        """Keep gradients on the parameters; reduce them once at the end, or drop them on errors.

        Raises Refused if a backward inside raised and the exception was caught inside; Misused
        inside itself or ``no_sync()``.
        """
        engine = self._engine
        if self.in_block:
            raise Misused(
                "coalesce_grad_reduction() cannot be nested inside another of the same engine: "
                "remove the inner one"
            )
        if engine.inside_no_sync_ctxt:
            raise Misused(
                "coalesce_grad_reduction() cannot be nested inside another no_sync context: remove "
                "no_sync(), which a block does not need"
            )
        gather = self._gather_once()
        boundary, previous_step = upstream_boundary.user_boundary(engine), self._steps.current_step
        try:
            if gather is not None:
                gather.begin()
            self.begin()
            self.in_block, self.failed = True, False
            engine.inside_no_sync_ctxt = True
            early_exit: GeneratorExit | None = None
            try:
                yield
            except GeneratorExit as error:  # left early, for example by `break`: nothing has failed
                early_exit = error
            self._steps.recover()
            if self.failed:
                raise Refused(
                    "a backward inside this coalesce_grad_reduction() raised, and its gradients "
                    "were dropped; do not catch the exception inside: let the exception leave the "
                    "block"
                )
            self._leave_block(gather)
            if gather is not None:
                gather.release()
            if not self.reduce() and previous_step.state is StepState.EMPTY:
                self._steps.end_empty_block()
            if early_exit is None:
                return
        except BaseException:
            self._leave_block(gather)
            had_backward = self.has_backward or self.failed
            self.end()
            self._steps.recover()
            upstream_engine.reset_backward(engine)
            for timer in getattr(engine.timers, "timers", {}).values():
                if timer.started_:  # a running timer cannot be started again
                    timer.stop()
            upstream_boundary.set_user_boundary(engine, boundary)
            if had_backward or engine.zero_optimization_partition_weights():  # which are gathered
                self.sum.drop_local()
                logger.warning(_RAISED)
            if had_backward and not self.failed:
                self._steps.resume_after_block(previous_step)
            raise
        raise early_exit

    def _gather_once(self) -> GatherOnce | None:
        """Return the `GatherOnce` of a block; None if it gathers as DeepSpeed does."""
        if not self._engine.zero_optimization_partition_weights():
            return None
        gather = gather_once.state_of(self._engine, self._steps)
        reason = gather.why_not
        how = "in each forward and backward" if reason else "once"
        why = reason or "all fit into stage3_max_live_parameters"
        lifecycle.note("coalesce", f"a ZeRO-3 block gathered parameters {how}: {why}")
        return None if reason else gather

    def _leave_block(self, gather: GatherOnce | None) -> None:
        """Clear the flags of a block, and restore DeepSpeed's module hooks."""
        self._engine.inside_no_sync_ctxt = self.in_block = False
        if gather is not None:
            gather.end()

    # --- no_sync() --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local for a later backward. Raises Misused inside itself or a block."""
        engine = self._engine
        if self.in_block:
            raise Misused(
                "no_sync context manager reentry is unsupported: it is nested in "
                "coalesce_grad_reduction(), which reduces nothing before its end: remove it"
            )
        if self.in_no_sync:
            raise Misused("no_sync context manager reentry is unsupported: remove the outer one")
        self.begin()
        self.in_no_sync = engine.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.in_no_sync = engine.inside_no_sync_ctxt = False
            if not self.has_backward:
                self.end()

    # --- Wrappers of DeepSpeed's methods ----------------------------------------------------------

    def _around_gradient(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Keep a gradient on its parameter, where DeepSpeed's hook would reduce it."""
        watch = self._steps.watch
        if self._steps.is_torch_style and watch.task_id != current_task_id() and not watch.running:
            self._steps.enter_at_parameter()

    def _around_allreduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Reduce the sum of backwards at the boundary, instead of each backward's gradients."""
        if self.in_block or self.in_no_sync:  # up to 0.18.2 DeepSpeed calls this there, too
            return
        if self._reduces_in_backward or self._engine.is_gradient_accumulation_boundary():
            self.reduce()

    def _around_backward(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Divide a loss in ``no_sync()`` too by the micro steps: DeepSpeed does from 0.18.3 on."""
        with meanwhile(self._engine, inside_no_sync_ctxt=False):
            return wrapped(*args, **kwargs)

    def _around_step(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run DeepSpeed's step, which before the boundary only counts a micro step.

        Raises Misused in a block, and at the boundary in ``no_sync()``; Refused at the boundary if
        nothing was reduced.
        """
        engine = self._engine
        if self.in_block:
            raise Misused(
                "engine.step() inside coalesce_grad_reduction(): as inside no_sync(), no gradients "
                "are reduced yet. Step after the block."
            )
        if not self._is_managed or engine.is_gradient_accumulation_boundary():
            if self.in_no_sync:
                raise Misused(
                    "engine.step() inside no_sync context manager, at a gradient accumulation "
                    "boundary: its gradients are not reduced. Run the last backward of the step, "
                    "and step, outside."
                )
            was_due = self.has_backward and (self._is_managed or self._reduces_in_backward)
            if was_due and any(self.sum.has_local_gradients()):
                raise Refused(
                    "engine.step() with gradients that no backward has reduced: all backwards of "
                    "this step were inside no_sync() or before the gradient accumulation boundary. "
                    "Run the last one outside, at the boundary."
                )
        with meanwhile(engine, inside_no_sync_ctxt=False):
            return wrapped(*args, **kwargs)
