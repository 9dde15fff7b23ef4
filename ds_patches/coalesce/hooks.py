"""The wrappers around DeepSpeed's methods: the block, and ``no_sync()``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Misused, NotCovered, Refused
from ds_patches.steps import attached
from ds_patches.steps.attached import Attached
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.kinds import Kind, kind_of

from . import block
from .local import LocalGradients

logger = logging.getLogger("ds_patches.coalesce")

_UNDIVIDED = (
    "engine.no_sync(): up to DeepSpeed 0.18.2 a backward in it is not divided by "
    "gradient_accumulation_steps, and one outside is: divide by hand in it"
)
_said_of: WeakSet[Any] = WeakSet()  # engines


def _take_in(engine: Any) -> LocalGradients | None:
    steps = attached.of(engine.optimizer)
    return None if steps is None or _why_not(engine) else LocalGradients(engine, steps)


_local: Attached[LocalGradients] = Attached("coalesce", _take_in)


def activate() -> Sequence[str]:
    """Take in the engines that are known already."""
    attached.subscribe(_local)
    return []


def deactivate() -> None:
    """Leave every engine to stock.

    Raises Misused inside a block, whose gradients nobody would reduce.
    """
    if any(local.in_block or local.in_no_sync for _, local in _local.all()):
        raise Misused(
            "coalesce is taken back inside coalesce_grad_reduction() or no_sync(): leave that first"
        )
    for local in attached.unsubscribe(_local):
        local.end()


def around_coalesce(
    wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs
) -> AbstractContextManager[None]:
    """Reduce the gradients of several backwards at once, when the block ends.

    Inside, each parameter's ``grad`` is this rank's unreduced sum, of the parameter's shape and
    dtype. Raises NotCovered for an engine that cannot have a block, as without ZeRO; Misused if it
    is nested or without managed gradient accumulation; Refused in a step that the patch has not
    seen begin, and at the end if a backward raised inside and was caught there.
    See ``ds_patches.coalesce``.
    """
    return _coalesce(engine, *args, **kwargs)


def _coalesce(engine: Any) -> AbstractContextManager[None]:
    if (refusal := _refusal(engine)) is not None:
        raise refusal
    steps = attached.take_in(engine)
    local = _local.get(engine)
    if attached.waits(engine):
        raise Refused(
            "coalesce_grad_reduction() in a step that began before the patch was applied: "
            "open it after the next engine.step()"
        )
    if steps is None or local is None:
        raise NotCovered(
            "coalesce_grad_reduction() does not cover this engine: accumulation leaves it to "
            "DeepSpeed"
        )
    return block.around(engine, steps, local)


def around_no_sync(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's ``no_sync()``; here also at stages 2 and 3, and at stage 1 with overlap_comm."""
    if upstream_engine.own_no_sync_works(engine):
        if upstream_engine.leaves_undivided(engine) and engine not in _said_of:
            _said_of.add(engine)
            logger.warning(_UNDIVIDED)
        return wrapped(*args, **kwargs)
    attached.take_in(engine)
    local = _local.get(engine)
    return wrapped(*args, **kwargs) if local is None else local.no_sync()


def _refusal(engine: Any) -> Refused | None:
    """Return what DeepSpeed's method raises for an engine that cannot have a block, or None.

    Misused: unmanaged gradient accumulation. NotCovered: no ZeRO, a pipeline, an optimizer or a
    backward that reduces in a way of its own.
    """
    method = "coalesce_grad_reduction()"
    if not upstream_boundary.manages_boundary(engine):
        return Misused(
            f"{method} is not supported with managed_gradient_accumulation=False: "
            "step() is the boundary already"
        )
    reason = _why_not(engine)
    return None if reason is None else NotCovered(f"{method} {reason}")


def _why_not(engine: Any) -> str | None:
    optimizer = engine.optimizer
    if (stage := int(engine.zero_optimization_stage())) not in (1, 2, 3):
        return f"requires ZeRO stage 1/2/3; this engine has stage {stage}"
    if engine.pipeline_parallelism:
        return "is not supported under pipeline parallelism"
    if getattr(engine, "zenflow", False):
        return "does not cover ZenFlow: it moves gradients in a way of its own"
    if kind_of(optimizer) not in (Kind.ZERO12, Kind.ZERO3):
        name = type(optimizer).__name__
        return f"does not cover the optimizer wrapper {name}: it takes gradients past ZeRO's hooks"
    if getattr(optimizer, "swap_optimizer", False):
        return "does not cover an optimizer offloaded to NVMe: it swaps within each backward"
    if upstream_engine.is_deep_compiled(engine):
        return "does not cover DeepCompile: its graphs reduce by themselves"
    if upstream_engine.folds_experts(engine):
        return "does not cover AutoEP folding: its tensor parallel correction is per backward"
    return None
