"""One engine while its gradients stay on their parameters: in a block, or for ``no_sync()``."""

from __future__ import annotations

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
from ds_patches.steps.listener import Listener
from ds_patches.steps.step import EngineSteps
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.engine import has_torch_style_backward

logger = logging.getLogger("ds_patches.coalesce")

_RAISED = (
    "A coalesce_grad_reduction() block raised: its gradients were dropped, and at ZeRO 1 those of "
    "the step's earlier micro steps, which lie with them."
)
_UNSCALED = (
    "backward() of a tensor in fp16: this DeepSpeed scales a loss in engine.backward() alone. Call "
    "engine.backward(tensor) instead."
)


class LocalGradients(Listener):
    """Where the gradients of one engine's backwards stay.

    While they stay on the parameters, autograd adds up, and nothing is reduced: the methods that
    would do so are wrapped at this one engine. At all other times nothing of ours is there.
    """

    awaits_backwards = False  # but while gradients stay

    def __init__(self, engine: Any, steps: EngineSteps) -> None:
        self.sum, self._group = steps.sum, reduction_group(engine)
        #: Whether a block, or ``no_sync()``, is open.
        self.in_block = self.in_no_sync = False
        #: A backward that raised since a block was opened.
        self.failed = False
        self._engine, self._steps = engine, steps
        self._layers: list[Layer] = []
        #: A backward has begun since gradients stay.
        self.waiting = False
        #: Where a step is its own boundary: whether each backward reduces, or the step does.
        self._finalizes = self._step_reduces = False
        if not upstream_boundary.manages_boundary(engine):
            self._finalizes = engine.zero_optimization_partition_gradients()
            self._step_reduces = not self._finalizes
        #: Whether DeepSpeed knows of plain backwards, and divides them by the micro steps.
        self._is_torch_style = has_torch_style_backward(engine)

    def begin(self) -> None:
        """Keep gradients on their parameters from here on."""
        if self._layers:
            return
        engine, optimizer = self._engine, self._engine.optimizer
        upstream_engine.clear_last_step(engine)
        self.sum.begin_local()
        method = upstream_engine.gradient_method(optimizer)
        self._layers = [
            Layer(optimizer, method, self._gradient_arrives),
            Layer(engine, "allreduce_gradients", self._backward_ends),
            Layer(engine, "step", self._step),
        ]
        if not self._is_torch_style:
            self._layers.append(Layer(engine, "backward", self._backward))
        self.awaits_backwards = True

    def end(self) -> None:
        """Let DeepSpeed reduce as ever from here on."""
        for layer in self._layers:
            layer.remove()
        self._layers = []
        self.sum.end_local()
        self.waiting = self.awaits_backwards = False

    def reduce(self) -> None:
        """Add what is there to the gradients of the step, if any rank has one. A collective."""
        had_backward = self.waiting
        self.end()
        if (lacking := self.sum.lacking(self._group)) is None:
            return
        if not had_backward:  # but another rank had
            self.sum.begin_backward()
        boundary = nullcontext() if self._finalizes else upstream_boundary.at_boundary(self._engine)
        with boundary:
            self.sum.reduce_local(lacking)

    # --- What `accumulation` tells of the engine's backwards --------------------------------------

    def backward_begins(self, again: bool) -> None:
        is_plain = self._engine not in engine_backwards
        if is_plain and self._engine.fp16_enabled() and not self._is_torch_style:
            raise Refused(_UNSCALED)
        self._keep()

    def backward_nested(self) -> None:
        """The outer one ends with one reduction, whatever runs inside it.

        Unless some of its gradients are on their way already: then all are reduced as they come.
        """
        if self._layers or not self.sum.is_late():
            self.begin()
            self._keep()

    def _keep(self) -> None:
        self.waiting = True
        self.sum.note_trained()

    def dropped(self, failed: bool) -> None:
        self.failed |= failed
        if self.in_block or self.in_no_sync:
            self.waiting = False
        else:
            self.end()

    # --- coalesce_grad_reduction() ----------------------------------------------------------------

    @contextmanager
    def block(self) -> Iterator[None]:
        """Keep gradients on the parameters, and reduce them once; or drop them if it raised.

        Raises Refused if a backward inside raised and the exception was caught inside; Misused
        inside itself or ``no_sync()``.
        """
        engine = self._engine
        if self.in_block:
            raise Misused(
                "coalesce_grad_reduction() cannot be nested inside another: one of this engine is "
                "open"
            )
        if engine.inside_no_sync_ctxt:
            raise Misused(
                "coalesce_grad_reduction() cannot be nested inside another no_sync context: open "
                "it outside of no_sync(), which it needs no more"
            )
        gathered = self._gathers()
        boundary, before = upstream_boundary.user_boundary(engine), self._steps.present
        try:
            if gathered is not None:
                gathered.begin()
            self.begin()
            self.in_block, self.failed = True, False
            engine.inside_no_sync_ctxt = True
            closed: GeneratorExit | None = None
            try:
                yield
            except GeneratorExit as error:  # left early, as by `break`: nothing has failed
                closed = error
            self._end_block(gathered)
            if closed is None:
                return
        except BaseException:
            self._leave_block(gathered)
            had_backward = self.waiting or self.failed
            self.end()
            self._steps.recover()
            upstream_engine.reset_backward(engine)
            for timer in getattr(engine.timers, "timers", {}).values():
                if timer.started_:  # it refuses to be started again
                    timer.stop()
            upstream_boundary.restore_boundary(engine, boundary)
            if had_backward or engine.zero_optimization_partition_weights():  # which are gathered
                self.sum.drop_local()
                logger.warning(_RAISED)
            if had_backward and not self.failed:
                self._steps.back_to(before)
            raise
        raise closed

    def _gathers(self) -> GatherOnce | None:
        """Return what gathers once for a block; None if it gathers as DeepSpeed does."""
        if not self._engine.zero_optimization_partition_weights():
            return None
        gathered = gather_once.of(self._engine, self._steps)
        reason = gathered.why_not
        how = "in each forward and backward" if reason else "once"
        why = reason or "all fit into stage3_max_live_parameters"
        lifecycle.note("coalesce", f"a ZeRO-3 block gathered parameters {how}: {why}")
        return None if reason else gathered

    def _end_block(self, gathered: GatherOnce | None) -> None:
        """Reduce what the block has. Raises Refused where a backward in it has raised."""
        self._steps.recover()
        if self.failed:
            raise Refused(
                "a backward inside this coalesce_grad_reduction() raised, and what was caught "
                "inside had dropped its gradients; let the exception leave the block"
            )
        self._leave_block(gathered)
        if gathered is not None:
            gathered.release()
        self.reduce()

    def _leave_block(self, gathered: GatherOnce | None) -> None:
        self._engine.inside_no_sync_ctxt = self.in_block = False
        if gathered is not None:
            gathered.end()

    # --- no_sync() --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raises Misused inside itself or a block."""
        engine = self._engine
        if self.in_block:
            raise Misused(
                "no_sync context manager reentry is unsupported: it is nested in "
                "coalesce_grad_reduction(), in which nothing is reduced anyway"
            )
        if self.in_no_sync:
            raise Misused("no_sync context manager reentry is unsupported: leave the outer one out")
        self.begin()
        self.in_no_sync = engine.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.in_no_sync = engine.inside_no_sync_ctxt = False
            if not self.waiting:
                self.end()

    # --- In the place of DeepSpeed's methods ------------------------------------------------------

    def _gradient_arrives(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed's hook of a parameter hands its gradient on; here that stays where it is."""
        watch = self._steps.watch
        if self._is_torch_style and watch.task_id != current_task_id() and not watch.running:
            self._steps.parameter_entered()

    def _backward_ends(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed reduces at the end of a backward; here the sum, at the boundary, or nothing."""
        if self.in_block or self.in_no_sync:  # up to 0.18.2 it is asked for there, too
            return
        if self._finalizes or self._engine.is_gradient_accumulation_boundary():
            self.reduce()

    def _backward(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Divide the loss by the micro steps, as outside: to 0.18.2, under no_sync it is not."""
        with meanwhile(self._engine, inside_no_sync_ctxt=False):
            return wrapped(*args, **kwargs)

    def _step(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """DeepSpeed's step; here it only counts a micro step, also inside ``no_sync()``.

        Raises Misused in a block, and at the boundary in ``no_sync()``; Refused at the boundary if
        nothing was reduced.
        """
        engine = self._engine
        if self.in_block:
            raise Misused(
                "engine.step() inside coalesce_grad_reduction(), where nothing is reduced yet, as "
                "inside no_sync(). Step after the block."
            )
        managed = upstream_boundary.manages_boundary(engine)
        if not managed or engine.is_gradient_accumulation_boundary():
            if self.in_no_sync:
                raise Misused(
                    "engine.step() inside no_sync context manager, at a gradient accumulation "
                    "boundary: its gradients are not reduced. Run the last backward of the step, "
                    "and step, outside."
                )
            is_due = self.waiting and not self._step_reduces
            if is_due and any(self.sum.have_local()):
                raise Refused(
                    "engine.step() with gradients that no backward has reduced: all backwards of "
                    "this step were inside no_sync() or before the gradient accumulation boundary. "
                    "Run the last one outside, at the boundary."
                )
        if not self.in_no_sync:
            return wrapped(*args, **kwargs)
        with meanwhile(engine, inside_no_sync_ctxt=False):
            return wrapped(*args, **kwargs)
