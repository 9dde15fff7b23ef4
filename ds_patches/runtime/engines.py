"""What several patches ask of a DeepSpeed engine or its optimizer, told apart by what they have."""

from __future__ import annotations

import gc
from typing import Any

from ds_patches.core import once


@once.per_call
def built() -> list[Any]:
    """Return every engine there is, but for those that ``gc.freeze()`` hides."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    kinds: list[type] = [DeepSpeedEngine]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Each object refers to its class: the collector looks for that without a line of Python. What
    # else it finds is told by type(), as a proxy claims the class of what it stands for.
    found = gc.get_referrers(*kinds)
    return [thing for thing in found if issubclass(type(thing), DeepSpeedEngine)]


def has_torch_style_backward(engine: Any) -> bool:
    """Whether ``loss.backward()`` without the engine works: 0.18.3 and later."""
    return hasattr(engine, "_backward_post_hook")


def is_deep_compiled(engine: Any) -> bool:
    """DeepCompile took the gathers and the reduction into its graphs (0.16.6 and later)."""
    active = getattr(engine, "is_deepcompile_active", None)
    if active is not None:
        return bool(active())
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    return enabled is not None and bool(enabled() and engine.is_compiled)


def at_boundary(optimizer: Any) -> bool:
    """Whether this backward ends a gradient accumulation: attribute, from 0.19.5 a method."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def forget_backward(engine: Any) -> None:
    """Clear what a backward that raised left behind in the engine's hook state."""
    if not has_torch_style_backward(engine):
        return
    optimizer = engine.optimizer
    optimizer._backward_active_depth = 0
    optimizer._remaining_grad_acc_hooks = 0
    reset = getattr(optimizer, "clear_backward_seen_flag", None)  # 0.18.5
    if reset is not None:
        optimizer._epilogue_ran_this_backward = False
        reset()
    if not hasattr(engine, "_running_engine_backward_count"):  # 0.18.3-0.19.5: a flag, no finally
        engine._running_engine_backward = False
    engine._manual_backward_expected = False
