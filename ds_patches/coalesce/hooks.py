"""The wrappers around ``coalesce_grad_reduction()`` and ``no_sync()``."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Misused, NotCovered, Refused
from ds_patches.steps import tracking
from ds_patches.steps.attached import Attached
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.coverage import why_no_block

from .local import LocalGradients

logger = logging.getLogger("ds_patches.coalesce")

_UNDIVIDED = (
    "engine.no_sync(): up to DeepSpeed 0.18.2 a backward in it is not divided by "
    "gradient_accumulation_steps, unlike one outside: divide the loss yourself inside"
)
_warned: WeakSet[Any] = WeakSet()  # engines


def _local_gradients_of(engine: Any) -> LocalGradients | None:
    """Return new `LocalGradients` of an engine; None if it cannot have a block."""
    steps = tracking.steps_of(engine.optimizer)
    return None if steps is None or why_no_block(engine) else LocalGradients(engine, steps)


_local: Attached[LocalGradients] = Attached("coalesce", _local_gradients_of)


def activate() -> Sequence[str]:
    """Attach to the engines that exist, and add the block's method where DeepSpeed has none."""
    tracking.subscribe(_local)
    upstream_engine.add_method(coalesce_grad_reduction)
    return []


def may_unapply() -> None:
    """Raise Misused inside a block, whose gradients would never be reduced."""
    if any(local.in_block or local.in_no_sync for _, local in _local.all()):
        raise Misused(
            "coalesce cannot be unapplied inside coalesce_grad_reduction() or no_sync(): leave the "
            "block first"
        )


def deactivate() -> None:
    """Remove the block's method, and the wrappers from every engine."""
    upstream_engine.remove_method(coalesce_grad_reduction)
    for local in tracking.unsubscribe(_local):
        local.end()


def around_coalesce(
    wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs
) -> AbstractContextManager[None]:
    """Replace DeepSpeed's block by one that reduces nothing after an exception."""
    return coalesce_grad_reduction(engine, *args, **kwargs)


def coalesce_grad_reduction(self: Any) -> AbstractContextManager[None]:
    """Reduce the gradients of several backwards at once, when the block ends. Collective.

    Inside, each parameter's ``grad`` is this rank's unreduced sum, of the parameter's shape and
    dtype. Raises NotCovered for an engine that cannot have a block, for example without ZeRO;
    Misused if it is nested or without managed gradient accumulation; Refused in a step that began
    before the patch was applied, and at the end if a backward raised inside and the exception was
    caught there. See ``ds_patches.coalesce``.
    """
    engine = self
    if not upstream_boundary.manages_boundary(engine):
        raise Misused(
            "coalesce_grad_reduction() is not supported with managed_gradient_accumulation=False: "
            "step() is the boundary already"
        )
    if (reason := why_no_block(engine)) is not None:
        raise NotCovered(f"coalesce_grad_reduction() {reason}")
    is_covered = tracking.track(engine) is not None
    if tracking.began_on_stock(engine):
        raise Refused(
            "coalesce_grad_reduction() in a step that began before the patch was applied: "
            "open it after the next engine.step()"
        )
    if not is_covered or (local := _local.get(engine)) is None:
        raise NotCovered(
            "coalesce_grad_reduction() does not cover this engine: accumulation leaves it to "
            "DeepSpeed"
        )
    return local.block()


def around_no_sync(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``no_sync()`` also at stages 2 and 3, and at stage 1 with overlap_comm."""
    overlaps = getattr(engine.optimizer, "overlap_comm", False)
    if not (engine.zero_optimization_partition_gradients() or overlaps):  # DeepSpeed's own works
        divides = upstream_engine.has_torch_style_backward(engine)
        if not divides and engine.gradient_accumulation_steps() > 1 and engine not in _warned:
            _warned.add(engine)
            logger.warning(_UNDIVIDED)
        return wrapped(*args, **kwargs)
    tracking.track(engine)
    local = _local.get(engine)
    return wrapped(*args, **kwargs) if local is None else local.no_sync()
