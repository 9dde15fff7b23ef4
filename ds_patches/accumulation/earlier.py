"""ZeRO-1/2 of 0.17.6 to 0.18.2: reduced gradients of earlier micro steps are kept, not replaced.

Those releases keep micro steps before the boundary in a store of their own, and look for them in
another: each micro step of ZeRO-2 replaces the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .upstream import flat


def add_to_earlier(
    collect: Callable[..., list[torch.Tensor]], optimizer: Any, params: Any, *rest: Any
) -> list[torch.Tensor]:
    """Upstream's collection of what a backward reduced, on top of the micro steps before."""
    now = collect(params, *rest)
    earlier = flat.earlier_micro_steps(optimizer, params)
    if earlier is None:
        return now
    for sum_, gradient in zip(earlier, now, strict=True):
        sum_.add_(gradient)
    return earlier
