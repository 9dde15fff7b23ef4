"""The gradient accumulation boundary: of an engine, of its optimizer, and between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.upstream.classes import ZERO3, ZERO12, class_of


def lacks_averages(optimizer: Any) -> bool:
    """Return True if the optimizer has no averaged gradients, and a step would fail."""
    return all(slices is None for slices in optimizer.averaged_gradients.values())


def is_at_boundary(optimizer: Any) -> bool:
    """Return True at the boundary: an attribute of the optimizer, from 0.19.5 a method."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def is_in_a_step(engine: Any) -> bool:
    """Return True if stock's backwards have left gradients for a step, or its block is open."""
    optimizer, kind = engine.optimizer, class_of(engine.optimizer)
    if getattr(optimizer, "_coalesce_grad_reduction", False):
        return True
    if kind == ZERO12:
        return bool(optimizer.micro_step_id >= 0)  # -1 from a step to its first backward
    if kind != ZERO3:
        return False
    # From 0.18.5 on the next forward counts.
    return optimizer.micro_step_id > 0 or getattr(optimizer, "_epilogue_ran_this_backward", False)


def manages_boundary(engine: Any) -> bool:
    """Return True if the engine counts micro steps: always, unless a setting of 0.19.4 is off."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return managed is None or bool(managed())


def asked_boundary(engine: Any) -> bool | None:
    """Return what the user has set; None for DeepSpeed's own count."""
    asked: bool | None = engine._is_gradient_accumulation_boundary
    return asked


@contextmanager
def at_boundary(engine: Any) -> Iterator[None]:
    """Let engine and optimizer take what is reduced here for the last of its step."""
    asked = asked_boundary(engine)
    engine._is_gradient_accumulation_boundary = True
    _tell_optimizer(engine.optimizer, True)
    try:
        yield
    finally:
        restore_boundary(engine, asked)


def restore_boundary(engine: Any, asked: bool | None) -> None:
    """Put back what `asked_boundary` was."""
    engine._is_gradient_accumulation_boundary = asked
    _tell_optimizer(engine.optimizer, engine.is_gradient_accumulation_boundary())


def _tell_optimizer(optimizer: Any, boundary: bool) -> None:
    if hasattr(optimizer, "set_gradient_accumulation_boundary"):  # 0.19.5
        optimizer.set_gradient_accumulation_boundary(boundary)
    else:
        optimizer.is_gradient_accumulation_boundary = boundary
