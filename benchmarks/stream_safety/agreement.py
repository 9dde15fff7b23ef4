"""Whether two rows have computed the same numbers, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gradients import full_gradients, relative_error
from benchmarks.timing import Step, wait_for

_STEPS = 3


@dataclass
class Agreement:
    """differing: elements whose bits are not the reference's, `of` so many.

    error: the largest relative error of a tensor; NaN if any is.
    """

    differing: int
    of: int
    error: float

    @classmethod
    def between(cls, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Agreement:
        """float32 tensors, one by one."""
        differing = sum(
            int((one.view(torch.int32) != other.view(torch.int32)).sum())
            for one, other in zip(ours, theirs, strict=True)
        )
        error = relative_error(ours, theirs) if differing else 0.0
        return cls(differing, sum(map(torch.numel, ours)), error)


def gradients(step: Step, engine: Any, device: torch.device) -> list[Tensor]:
    """All of some steps, each as it stands at the end of the backward."""
    found: list[Tensor] = []

    def look(ended: str) -> None:
        if ended == "backward":
            wait_for(device)  # reduction has a stream of its own
            found.extend(full_gradients(engine))

    for _ in range(_STEPS):
        step(look)
    return found


def end(engine: Any) -> list[Tensor]:
    """The parameters as they are now, and AdamW's running averages of their gradients; float32."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return [
        tensor
        for param in engine.module.parameters()
        for tensor in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
        )
    ]
