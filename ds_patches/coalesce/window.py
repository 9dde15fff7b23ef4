"""One window of an engine: opened, counted, closed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ds_patches.core import engines

from .backwards import Backwards
from .counters import are_on_one_host
from .gather_once import GatherOnce
from .handshake import Handshake
from .local_sum import FlatSum, LocalSum, PartitionedSum
from .scattered_sum import ScatteredSum
from .upstream import engine as upstream_engine
from .upstream import flat_layout

logger = logging.getLogger("ds_patches.coalesce")

_KEY = "_ds_patches_coalesce"


_handshakes: WeakKeyDictionary[Any, Handshake] = WeakKeyDictionary()  # by engine


def _handshake_of(engine: Any, kind: str) -> Handshake | None:
    """None where there is nobody to shake hands with, or where they are not to."""
    ranks = upstream_engine.ranks(engine)
    if len(ranks) < 2 or kind == "off":
        return None
    if engine not in _handshakes:
        on_one_host = kind == "on" and are_on_one_host(os.environ)
        _handshakes[engine] = Handshake(ranks, on_one_host)
    return _handshakes[engine]


def of(owner: Any) -> Window | None:
    """The window that an engine, or its optimizer, is in."""
    window: Window | None = vars(owner).get(_KEY)
    return window


@dataclass(frozen=True)
class Choice:
    """What the user chose for all windows."""

    native: bool = False
    handshake: str = "on"
    scatters: bool = True


class Window:
    """The backwards between the two ends of one ``with`` block."""

    def __init__(
        self, engine: Any, num_backwards: int | None, gather_once: bool, choice: Choice
    ) -> None:
        self._engine = engine
        self._backwards = Backwards(num_backwards)
        self._boundary_at_entry = engine._is_gradient_accumulation_boundary
        self._sum = _sum_of(engine, choice)
        self._residency = GatherOnce(engine) if gather_once else None
        self._handshake = _handshake_of(engine, choice.handshake)
        self._raised = ""  # what a backward of this window raised

    # --- Backwards ------------------------------------------------------------------------------

    def boundary_is_set(self, boundary: bool) -> None:
        """The user says whether the next backward is the last one of its step."""
        self._backwards.boundary_is_set(boundary)

    def backward_begins(self) -> None:
        """Raises RuntimeError for one more than was announced."""
        self._backwards.begin()
        if self._backwards.is_last:
            self._sum.begin_last_backward(self._handshake)

    def backward_ends(self) -> None:
        self._backwards.end()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``engine.backward``.

        Up to 0.18.2 this is where a backward begins; later its prologue is, which comes once per
        forward: a second backward over one forward is counted when it has run.
        """
        engine, begun = self._engine, self._backwards.begun
        if not engines.has_torch_style_backward(engine):
            self.backward_begins()
        with upstream_engine.dividing_by_micro_steps(engine):
            try:
                yield
            except BaseException as error:
                self._raised = f"{type(error).__name__}: {error}"
                raise
        if self._backwards.begun == begun:
            self._backwards.begin()
        self.backward_ends()

    def gradient_arrives(self, *arguments: Any) -> None:
        """A parameter's hook: raises RuntimeError after the last backward that was announced.

        A plain ``loss.backward()`` again over one forward has no prologue to be counted by.
        """
        if self._backwards.are_over:
            self._backwards.begin()
        self._backwards.gradient_arrives()
        self._sum.ready(*arguments)

    # --- Both ends ------------------------------------------------------------------------------

    def open(self) -> None:
        engine = self._engine
        if self._handshake is not None:
            self._handshake.begin()
        upstream_engine.forget_last_step(engine)
        engine.inside_no_sync_ctxt = True
        vars(engine)[_KEY] = vars(engine.optimizer)[_KEY] = self
        if self._residency is not None:
            self._residency.begin()

    def close(self) -> None:
        """Reduce once, after all ranks have come.

        Raises RuntimeError if a backward inside raised and the exception was caught inside.
        """
        if raised := self._raised_inside():
            raise RuntimeError(
                "a backward inside this coalesce_grad_reduction() raised, so its gradients are "
                f"half there; let the exception leave the block. It was {raised}"
            )
        self._sum.settle()
        self._sum.meet(self._handshake)
        self._leave()
        if self._residency is not None:
            self._residency.release()
        if self._sum.replaces():
            logger.warning(
                "Gradients that were reduced earlier in this step are replaced by this window's: "
                "one coalesce_grad_reduction() is one optimizer step."
            )
        with upstream_engine.at_boundary(self._engine):
            self._sum.reduce()

    def _raised_inside(self) -> str:
        """The exception of a backward, which was caught in the block, or nothing."""
        if self._backwards.were_cut_short and not self._raised:
            return "that of a plain loss.backward()"
        return self._raised

    def fail(self, error: BaseException) -> None:
        """Drop what the window gathered, and leave the engine as it was before."""
        counted_on = self._handshake is None or self._handshake.fail(error)
        self._leave()
        upstream_engine.forget_backward(self._engine)
        upstream_engine.restore_boundary(self._engine, self._boundary_at_entry)
        self._sum.drop()
        if counted_on:
            self._sum.abandon()
        logger.warning("A coalesce_grad_reduction() window raised: its gradients were dropped.")

    def _leave(self) -> None:
        self._engine.inside_no_sync_ctxt = False
        for owner in (self._engine, self._engine.optimizer):
            vars(owner).pop(_KEY, None)
        if self._residency is not None:
            self._residency.end()


def _sum_of(engine: Any, choice: Choice) -> LocalSum:
    if upstream_engine.partitions_parameters(engine):
        return PartitionedSum(engine.optimizer)
    if choice.scatters and flat_layout.covers(engine.optimizer):
        return ScatteredSum(engine.optimizer)
    return FlatSum(engine.optimizer)


@contextmanager
def window(
    engine: Any, num_backwards: int | None, gather_once: bool, choice: Choice
) -> Iterator[None]:
    """Check, open, and close by whether the body raised."""
    upstream_engine.must_be_covered(engine)
    _must_be_free(engine)
    _must_make_sense(engine, num_backwards, gather_once)
    opened = Window(engine, num_backwards, gather_once, choice)
    try:
        opened.open()
        yield
        opened.close()
    except BaseException as error:
        opened.fail(error)
        raise


def _must_be_free(engine: Any) -> None:
    assert of(engine) is None, "coalesce_grad_reduction() is not re-entrant: a window is open"
    assert not engine.inside_no_sync_ctxt, (
        "coalesce_grad_reduction() cannot be opened inside no_sync()"
    )


def _must_make_sense(engine: Any, num_backwards: int | None, gather_once: bool) -> None:
    if num_backwards is not None and num_backwards < 1:
        raise ValueError(f"num_backwards is {num_backwards}; a window has at least one backward")
    if gather_once:
        GatherOnce.must_be_covered(engine)
