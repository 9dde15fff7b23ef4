"""The gradient accumulation boundary of an engine and of its optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.upstream.classes import ZERO3, ZERO12, class_of


def lacks_averages(optimizer: Any) -> bool:
    """Return True if the optimizer has no averaged gradients, and a step would fail."""
    return all(slices is None for slices in optimizer.averaged_gradients.values())


def is_at_boundary(optimizer: Any) -> bool:
    """Return True if the optimizer is at the boundary: an attribute, from 0.19.5 a method."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def is_in_a_step(engine: Any) -> bool:
    """Return True if backwards without the patches left gradients, or their block is open."""
    optimizer, kind = engine.optimizer, class_of(engine.optimizer)
    if getattr(optimizer, "_coalesce_grad_reduction", False):
        return True
    if kind == ZERO12:
        return bool(optimizer.micro_step_id >= 0)  # -1 until the first backward of a step
    if kind != ZERO3:
        return False
    # From 0.18.5 on the next forward increments the id, not the backward.
    return optimizer.micro_step_id > 0 or getattr(optimizer, "_epilogue_ran_this_backward", False)


def manages_boundary(engine: Any) -> bool:
    """Return True if the engine counts micro steps: always, unless a setting of 0.19.4 is off."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return managed is None or bool(managed())


def user_boundary(engine: Any) -> bool | None:
    """Return the boundary that the user has set, or None if DeepSpeed counts micro steps."""
    boundary: bool | None = engine._is_gradient_accumulation_boundary
    return boundary


@contextmanager
def at_boundary(engine: Any) -> Iterator[None]:
    """Set the boundary of the engine and its optimizer meanwhile, as in a step's last backward."""
    boundary = user_boundary(engine)
    set_user_boundary(engine, True)
    try:
        yield
    finally:
        set_user_boundary(engine, boundary)


def set_user_boundary(engine: Any, boundary: bool | None) -> None:
    """Set the engine's boundary to a value of `user_boundary`, and its optimizer's by that."""
    engine._is_gradient_accumulation_boundary = boundary
    optimizer, boundary = engine.optimizer, engine.is_gradient_accumulation_boundary()
    if hasattr(optimizer, "set_gradient_accumulation_boundary"):  # 0.19.5
        optimizer.set_gradient_accumulation_boundary(boundary)
    else:
        optimizer.is_gradient_accumulation_boundary = boundary
