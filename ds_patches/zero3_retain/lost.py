"""What to do when a backward is about to overwrite gradients of the same step.

With ``gradient_accumulation_steps=1`` DeepSpeed takes every backward for the last one of the
step. From 0.18.3 (stages 1 and 2) and 0.18.5 (stage 3) a backward over *another* forward then
replaces what an earlier one had reduced, where PyTorch would add. Scripts that train that way
today keep their numbers unless asked otherwise.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from ds_patches.core import claims

logger = logging.getLogger("ds_patches.zero3_retain")

TOPIC = "lost gradients"
PATCH = "zero3_retain"


class OnLost(str, Enum):
    """The option ``lost_gradients`` of this patch."""

    WARN = "warn"  # keep stock's numbers, say so once per engine
    ACCUMULATE = "accumulate"  # add, as PyTorch does
    SILENT = "silent"  # keep stock's numbers


class LostGradients:
    """The choice for the engine of one optimizer; warns once, if no other patch did."""

    def __init__(self, policy: OnLost, micro_steps: int, optimizer: Any) -> None:
        self._policy = policy
        self._micro_steps = micro_steps
        self._optimizer = optimizer
        self._warned = False
        claims.claim(optimizer, TOPIC, PATCH)

    def detach(self) -> None:
        """Answer for this optimizer no longer."""
        claims.release(self._optimizer, TOPIC, PATCH)

    @property
    def accumulates(self) -> bool:
        """Whether a gradient that meets one of the same step is added to it."""
        return self._policy is OnLost.ACCUMULATE

    def warn(self) -> None:
        """Say once that a gradient of this step was overwritten."""
        if self._policy is not OnLost.WARN or self._warned:
            return
        if claims.holder(self._optimizer, TOPIC) != PATCH:
            return  # another patch answers for it
        self._warned = True
        logger.warning(
            "A gradient that was already reduced in this step was overwritten: with "
            "gradient_accumulation_steps=%s DeepSpeed keeps only the last backward's. To add them, "
            "set gradient_accumulation_steps to the number of backwards per step, or call "
            "engine.set_gradient_accumulation_boundary(False) before all but the last, or set "
            "DS_PATCHES_ZERO3_RETAIN_LOST_GRADIENTS=accumulate (=silent keeps the numbers and "
            "drops this warning).",
            self._micro_steps,
        )
