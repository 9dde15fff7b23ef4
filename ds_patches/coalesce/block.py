"""One block of an engine: opened, and closed by one reduction, or by none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ds_patches.accumulation.steps import EngineSteps
from ds_patches.core import lifecycle
from ds_patches.runtime.counters import are_on_one_host
from ds_patches.runtime.handshake import MOST_RANKS, Handshake

from .gather_once import GatherOnce
from .local import LocalGradients
from .upstream import engine as upstream_engine
from .upstream import gathers

logger = logging.getLogger("ds_patches.coalesce")

_handshakes: WeakKeyDictionary[Any, Handshake] = WeakKeyDictionary()  # by engine


def _handshake_of(engine: Any, ranks: Sequence[int]) -> Handshake | None:
    """None where there is nobody to shake hands with, or where they are more than it can count."""
    if not 1 < len(ranks) <= MOST_RANKS:
        return None
    if engine not in _handshakes:
        on_one_host = are_on_one_host(os.environ)
        _handshakes[engine] = Handshake(ranks, "in this coalesce_grad_reduction(),", on_one_host)
    return _handshakes[engine]


def _gathers(engine: Any, steps: EngineSteps, asked: bool | None) -> GatherOnce | None:
    """How a block gathers; None: as DeepSpeed does. `asked`: what its caller says."""
    if asked and (reason := gathers.why_not(engine)) is not None:
        raise NotImplementedError(reason)
    if not engine.zero_optimization_partition_weights():
        return None
    reason = gathers.why_not_unasked(engine) if asked is None else f"gather_once={asked}"
    once = asked or reason is None
    how = "once" if once else "in each forward and backward"
    why = reason or "all fit into stage3_max_live_parameters"
    lifecycle.note("coalesce", f"a ZeRO-3 block gathered parameters {how}: {why}")
    return GatherOnce(engine, steps, at_once=bool(asked)) if once else None


class Block:
    """The backwards between the two ends of one ``with`` block."""

    def __init__(
        self,
        engine: Any,
        steps: EngineSteps,
        local: LocalGradients,
        gathered: GatherOnce | None,
    ) -> None:
        self._engine, self._steps, self._local = engine, steps, local
        self._boundary_at_entry = engine._is_gradient_accumulation_boundary
        self._gathered = gathered
        ranks = upstream_engine.ranks(engine)
        self._handshake = _handshake_of(engine, ranks)
        self._may_differ = len(ranks) > 1

    def open(self) -> None:
        if self._handshake is not None:
            self._handshake.begin()
        self._local.begin()
        self._local.in_block, self._local.failed = True, False
        self._engine.inside_no_sync_ctxt = True
        if self._gathered is not None:
            self._gathered.begin()

    def close(self) -> None:
        """Reduce once, after all ranks have come.

        Raises RuntimeError if a backward inside raised and the exception was caught inside.
        """
        self._steps.recover()
        if self._local.failed:
            raise RuntimeError(
                "a backward inside this coalesce_grad_reduction() raised, and what was caught "
                "inside had dropped its gradients; let the exception leave the block"
            )
        pattern = self._local.sum.prepare()
        uneven = self._may_differ
        if self._handshake is not None:
            uneven = self._handshake.leave(pattern)
        self._leave()
        if self._gathered is not None:
            self._gathered.release()
        self._local.reduce(uneven)

    def fail(self, error: BaseException) -> None:
        """Drop what the block gathered, and leave the engine as it was before."""
        if self._handshake is not None:
            self._handshake.fail(error)
        self._leave()
        self._local.end()
        self._steps.recover()
        upstream_engine.forget_backward(self._engine)
        upstream_engine.restore_boundary(self._engine, self._boundary_at_entry)
        self._local.sum.drop()
        logger.warning("A coalesce_grad_reduction() block raised: its gradients were dropped.")

    def _leave(self) -> None:
        self._engine.inside_no_sync_ctxt = self._local.in_block = False
        if self._gathered is not None:
            self._gathered.end()


@contextmanager
def around(
    engine: Any, steps: EngineSteps, local: LocalGradients, gather_once: bool | None
) -> Iterator[None]:
    """Check, open, and close by whether the body raised."""
    assert not local.in_block, (
        "coalesce_grad_reduction() blocks cannot be nested: one of this engine is open"
    )
    assert not engine.inside_no_sync_ctxt, "coalesce_grad_reduction() cannot be nested in no_sync()"
    block = Block(engine, steps, local, _gathers(engine, steps, gather_once))
    try:
        block.open()
        yield
        block.close()
    except BaseException as error:
        block.fail(error)
        raise
