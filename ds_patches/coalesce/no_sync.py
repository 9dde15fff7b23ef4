"""Micro steps that reduce nothing: ``no_sync()`` and what is not at the boundary, as in DDP.

An engine that is taken in keeps every gradient on its parameter, where autograd adds up. The
backward at the boundary and outside ``no_sync()`` reduces the sum when it ends, as a window does:
all of it in one pass, in an order that does not depend on which parameter got its gradient when,
with zeros where a rank has none. What a step reduces twice adds up too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from ds_patches.core import claims, engines

from . import window as windows
from .lost import PATCH, TOPIC
from .step_sum import FlatStepSum, PartitionedStepSum, StepSum
from .upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.coalesce")

_KEY = "_ds_patches_coalesce_micro_steps"


@dataclass(frozen=True)
class StepChoice:
    """What the user chose for backwards outside windows.

    no_sync: those inside ``no_sync()`` and before the boundary reduce nothing.
    accumulates: those that upstream would replace are added to.
    """

    no_sync: bool = False
    accumulates: bool = False
    scatters: bool = True


class MicroSteps:
    """The backwards of one engine between two of its optimizer steps."""

    def __init__(self, engine: Any, choice: StepChoice) -> None:
        self._engine = engine
        self._unsynced = choice.no_sync
        self._sum: StepSum
        if upstream_engine.partitions_parameters(engine):
            self._sum = PartitionedStepSum(engine.optimizer)
        else:
            self._sum = FlatStepSum(engine.optimizer, choice.scatters)
        #: Whether gradients stay on their parameters. Without micro steps there is no reason to,
        #: and upstream reduces during the backward.
        self._keeps: bool = (
            engine.gradient_accumulation_steps() > 1
            if choice.no_sync
            else self._sum.is_lost_before_the_boundary
        )
        self._inside = False  # no_sync()
        self._waiting = False  # gradients of this step that no backward has reduced
        self._reduced = False  # something of this step

    # --- Backwards ------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self._keeps |= self._reduced  # one more of its step, which upstream may put in the place
        if self._is_local():
            self._keeps = True
            if not self._waiting:
                upstream_engine.forget_last_step(self._engine)
            self._waiting = True

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``engine.backward``."""
        self.backward_begins()
        dividing = upstream_engine.dividing_by_micro_steps(self._engine)
        try:
            with dividing if self._inside else nullcontext():
                yield
        except BaseException:
            if self._keeps:
                self._outlive_failure()
            raise

    def keeps_gradient(self) -> bool:
        """A parameter's hook, or a flush: whether its gradient stays where it is."""
        return self._keeps and not upstream_engine.is_flushing(self._engine.optimizer)

    def ends_without_reduction(self) -> bool:
        """A backward ends: reduces if it is the one to do so; False leaves it to upstream."""
        if self._is_local():
            return True
        if self._keeps:
            self._reduce()
        self._reduced |= bool(self._engine.is_gradient_accumulation_boundary())
        return self._keeps

    def _is_local(self) -> bool:
        if self._inside:
            return True
        at_boundary: bool = self._engine.is_gradient_accumulation_boundary()
        return not at_boundary and (self._unsynced or self._keeps)

    def _reduce(self) -> None:
        claims.claim(self._engine.optimizer, TOPIC, PATCH)  # nothing is lost, whoever looks on
        with upstream_engine.at_boundary(self._engine):
            self._sum.reduce(again=self._reduced)
        self._sum.clear()
        self._waiting = False

    def _outlive_failure(self) -> None:
        """Let training go on after a backward that raised; as in DDP, gradients stay."""
        upstream_engine.forget_backward(self._engine)
        self._sum.recover()
        self._waiting = True
        logger.warning(
            "A backward raised: what this step has gathered, and what that backward has added to "
            "it, stays on the parameters, as in DistributedDataParallel. engine.zero_grad() drops "
            "it."
        )

    # --- no_sync(), step(), zero_grad() ---------------------------------------------------------

    @property
    def unsynced(self) -> bool:
        """Whether ``no_sync()`` is this one's."""
        return self._unsynced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raises AssertionError inside itself or a window."""
        engine = self._engine
        assert windows.of(engine) is None, (
            "no_sync() cannot be opened inside coalesce_grad_reduction()"
        )
        assert not self._inside, "no_sync() is not re-entrant"
        self._inside = engine.inside_no_sync_ctxt = self._keeps = True
        try:
            yield
        finally:
            self._inside = engine.inside_no_sync_ctxt = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around ``engine.step``, which at a micro step only counts, also inside ``no_sync()``."""
        engine = self._engine
        if not engine.is_gradient_accumulation_boundary():
            if self._inside:
                engine.inside_no_sync_ctxt = False
            try:
                yield
            finally:
                engine.inside_no_sync_ctxt |= self._inside
            return
        assert not self._inside, (
            "engine.step() inside no_sync(), at a gradient accumulation boundary: its gradients "
            "are not reduced. Run the last backward of the step, and step, outside."
        )
        if self._waiting and self._sum.has_gradients():
            raise RuntimeError(
                "engine.step() with gradients that no backward has reduced: all backwards of this "
                "step were inside no_sync() or before the gradient accumulation boundary. Run the "
                "last one outside, at the boundary."
            )
        self._waiting = self._reduced = False  # also for the zero_grad() that ends a step
        yield

    def zero_grad(self) -> None:
        """Forget this step's gradients."""
        if self._waiting:
            self._sum.clear()
        self._keeps |= self._reduced  # upstream would add to what it has reduced
        self._waiting = self._reduced = False

    @contextmanager
    def noting(self, window: AbstractContextManager[None]) -> Iterator[None]:
        """Around a window: it reduces what waits with its own, and what comes later is added."""
        with window:
            yield
        self._waiting, self._reduced = False, True


# --- Engines ------------------------------------------------------------------------------------


class MicroStepsByEngine:
    """Which engines have been met, while an option asks for it."""

    def __init__(self) -> None:
        self._choice = StepChoice()
        self._on = False
        self._met: WeakSet[Any] = WeakSet()

    def choose(self, choice: StepChoice) -> None:
        self._choice = choice
        self._on = choice.no_sync or choice.accumulates

    def meet(self, engine: Any) -> MicroSteps | None:
        """At a backward or at no_sync(). None: the engine is left to upstream."""
        if not self._on:
            return None
        met = self.of(engine)
        if _KEY not in vars(engine) or (met and engines.is_deep_compiled(engine)):
            self._met.add(engine)
            met = vars(engine)[_KEY] = vars(engine.optimizer)[_KEY] = self._take_in(engine)
        return met

    def of(self, owner: Any) -> MicroSteps | None:
        """Of an engine that was met, or of its optimizer."""
        if not self._on:
            return None
        micro_steps: MicroSteps | None = vars(owner).get(_KEY)
        return micro_steps

    def let_go(self) -> None:
        self._on = False
        for engine in self._met:
            claims.release(engine.optimizer, TOPIC, PATCH)
            for owner in (engine, engine.optimizer):
                vars(owner).pop(_KEY, None)
        self._met.clear()

    def _take_in(self, engine: Any) -> MicroSteps | None:
        if not engine.zero_optimization():
            return None  # upstream's own no_sync() does it all
        try:
            upstream_engine.must_be_covered(engine)
        except (AssertionError, NotImplementedError) as error:
            logger.warning(
                "%s does nothing for this engine, which is left to stock DeepSpeed: what it covers "
                "are the engines of coalesce_grad_reduction(). %s",
                "no_sync=on" if self._choice.no_sync else "lost_gradients=accumulate",
                error,
            )
            return None
        return MicroSteps(engine, self._choice)
