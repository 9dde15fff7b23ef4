"""Activations that the backward computes again."""

from __future__ import annotations

from typing import Any

from tests.scripts.declared import ALL_RIGHT, script
from tests.scripts.ordinary import one_backward


@script(ALL_RIGHT, model="NonReentrant")
def non_reentrant(trainer: Any) -> None:
    """Blocks under ``checkpoint(use_reentrant=False)``, as Hugging Face's Trainer has them."""
    one_backward(trainer)


@script(ALL_RIGHT, model="Reentrant")
def reentrant(trainer: Any) -> None:
    """Blocks under ``checkpoint(use_reentrant=True)``."""
    one_backward(trainer)
