"""One engine while its gradients stay on their parameters: in a block, or for ``no_sync()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ds_patches.core.agreement import reduction_group
from ds_patches.core.calls import Args, Kwargs, Wrapped, meanwhile
from ds_patches.core.errors import Misused, Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import current_task_id
from ds_patches.steps.step import EngineSteps, Listener
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.engine import has_torch_style_backward


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
        #: Whether plain backwards are divided by the micro steps, those that begin at an output.
        self._divides_others = has_torch_style_backward(engine)

    def begin(self) -> None:
        """Keep gradients on their parameters from here on."""
        if self._layers:
            return
        engine, optimizer = self._engine, self._engine.optimizer
        upstream_engine.forget_last_step(engine)
        method = upstream_engine.gradient_method(optimizer)
        self._layers = [
            Layer(optimizer, method, self._gradient_arrives),
            Layer(engine, "allreduce_gradients", self._backward_ends),
            Layer(engine, "backward", self._backward),
            Layer(engine, "step", self._step),
        ]
        self.awaits_backwards = True

    def end(self) -> None:
        """Let DeepSpeed reduce as ever from here on."""
        for layer in self._layers:
            layer.remove()
        self._layers = []
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
        if not self._steps.in_engine_backward:
            upstream_engine.must_scale(self._engine)
        self.waiting = True

    def backward_nested(self) -> None:
        """The outer one ends with one reduction, whatever runs inside it.

        Raises Refused where some of its gradients are on their way already.
        """
        if not self._layers and self.sum.is_late():
            raise Refused(
                "a backward begins inside another, of which a gradient has already been reduced, "
                "or put into a bucket: put the outer one into "
                "`with engine.coalesce_grad_reduction():`"
            )
        self.begin()
        self.waiting = True

    def dropped(self, failed: bool) -> None:
        self.failed |= failed
        if self.in_block or self.in_no_sync:
            self.waiting = False
        else:
            self.end()

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
        if self._divides_others and watch.task_id != current_task_id() and not watch.running:
            self._steps.parameter_entered()

    def _backward_ends(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed reduces at the end of a backward; here the sum, at the boundary, or nothing."""
        if self.in_block or self.in_no_sync:  # up to 0.18.2 it is asked for there, too
            return
        if self._finalizes or self._engine.is_gradient_accumulation_boundary():
            self.reduce()

    def _backward(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        with upstream_engine.dividing_by_micro_steps(self._engine):
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
        if upstream_boundary.steps_now(engine):
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
