"""Pipelines that average micro steps on every stage, and run without ZeRO."""

import logging
from typing import Any
from weakref import WeakSet

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.classes import ENGINE
from ds_patches.upstream.engine import as_engine_backward

PATCH = Patch(
    name="pipelines",
    summary="pipelines average their micro steps on every stage, and run without ZeRO",
    remove_when="your release is 0.19.3 or later",
    upstream=upstream("PR 8154", "issue 8152"),
    supported=">=0.16.0,<=0.19.2",
    targets=(
        ENGINE.target("backward", "around_backward", "<=0.18.2"),
        ENGINE.target("_backward_prologue", "around_prologue", ">=0.18.3,<=0.18.4"),
        ENGINE.target("_backward_prologue_per_tensor", "around_per_tensor", ">=0.18.3,<=0.19.2"),
    ),
)

apply, unapply, is_applied = api.of(__name__)

logger = logging.getLogger("ds_patches.pipelines")

_AVERAGED = (
    "The micro steps of this pipeline are averaged, as DeepSpeed documents it, where this release "
    "adds them up. If the learning rate was tuned to the sum, multiply it by %d."
)
_warned: WeakSet[Any] = WeakSet()  # engines


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Divide the loss of the last stage by the micro steps, which DeepSpeed omits up to 0.18.2."""
    micro_steps: int = engine.gradient_accumulation_steps()
    if not engine.pipeline_parallelism or micro_steps == 1:
        return wrapped(*args, **kwargs)
    if engine not in _warned:
        _warned.add(engine)
        logger.warning(_AVERAGED, micro_steps)
    loss, *rest = in_order(wrapped, args, kwargs)
    return wrapped(loss.float() / micro_steps, *rest)


def around_per_tensor(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Divide gradients in the last stage alone; DeepSpeed divides at every stage's outputs."""
    if engine.pipeline_parallelism and not engine.is_last_stage():
        return in_order(wrapped, args, kwargs)[0]
    return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Mark a stage's backward as the engine's; 0.18.3 and 0.18.4 take it for the script's."""
    # In fp16 without ZeRO, half_without_zero scales the loss and marks the backward.
    is_unscaled = engine.fp16_enabled() and not engine.zero_optimization()
    if not engine.pipeline_parallelism or is_unscaled:
        return wrapped(*args, **kwargs)
    with as_engine_backward(engine, is_scaled=True):  # by the last stage
        return wrapped(*args, **kwargs)
