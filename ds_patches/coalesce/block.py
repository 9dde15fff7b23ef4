"""One block of an engine: opened, and closed by one reduction, or by none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.core import lifecycle
from ds_patches.core.errors import Misused, Refused
from ds_patches.steps.step import EngineSteps
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream import zero3_gathers as gathers

from .gather_once import GatherOnce
from .local import LocalGradients

logger = logging.getLogger("ds_patches.coalesce")

_RAISED = (
    "A coalesce_grad_reduction() block raised: its gradients were dropped, and at ZeRO 1 those of "
    "the step's earlier micro steps, which lie with them."
)


@contextmanager
def around(engine: Any, steps: EngineSteps, local: LocalGradients) -> Iterator[None]:
    """Let gradients add up on the parameters, and reduce them once; or drop them if it raised.

    Raises Refused if a backward inside raised and the exception was caught inside.
    """
    if local.in_block:
        raise Misused(
            "coalesce_grad_reduction() cannot be nested inside another: one of this engine is open"
        )
    if engine.inside_no_sync_ctxt:
        raise Misused(
            "coalesce_grad_reduction() cannot be nested inside another no_sync context: open it "
            "outside of no_sync(), which it needs no more"
        )
    gathered = _gathers(engine, steps)
    boundary, before = upstream_boundary.asked_boundary(engine), steps.present
    try:
        local.begin()
        local.in_block, local.failed = True, False
        engine.inside_no_sync_ctxt = True
        if gathered is not None:
            gathered.begin()
        closed: GeneratorExit | None = None
        try:
            yield
        except GeneratorExit as error:  # left early, as by `break`: nothing has failed
            closed = error
        _end(engine, steps, local, gathered)
        if closed is None:
            return
    except BaseException:
        _leave(engine, local, gathered)
        had_backward = local.waiting or local.failed
        local.end()
        steps.recover()
        upstream_engine.forget_backward(engine)
        upstream_engine.stop_timers(engine)
        upstream_boundary.restore_boundary(engine, boundary)
        if had_backward or engine.zero_optimization_partition_weights():  # which are gathered
            steps.sum.drop_local()
            logger.warning(_RAISED)
        if had_backward and not local.failed:
            steps.back_to(before)
        raise
    raise closed


def _end(
    engine: Any, steps: EngineSteps, local: LocalGradients, gathered: GatherOnce | None
) -> None:
    """Reduce what the block has. Raises Refused where a backward in it has raised."""
    steps.recover()
    if local.failed:
        raise Refused(
            "a backward inside this coalesce_grad_reduction() raised, and what was caught "
            "inside had dropped its gradients; let the exception leave the block"
        )
    _leave(engine, local, gathered)
    if gathered is not None:
        gathered.release()
    local.reduce()


def _leave(engine: Any, local: LocalGradients, gathered: GatherOnce | None) -> None:
    engine.inside_no_sync_ctxt = local.in_block = False
    if gathered is not None:
        gathered.end()


def _gathers(engine: Any, steps: EngineSteps) -> GatherOnce | None:
    """Return what gathers once for a block; None if it gathers as DeepSpeed does."""
    if not engine.zero_optimization_partition_weights():
        return None
    reason = gathers.why_not_once(engine)
    how = "in each forward and backward" if reason else "once"
    why = reason or "all fit into stage3_max_live_parameters"
    lifecycle.note("coalesce", f"a ZeRO-3 block gathered parameters {how}: {why}")
    return None if reason else GatherOnce(engine, steps)
