"""What is read of a step besides its time: memory and gradients.

Each takes a step of its own, so that reading never stands in a timed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import gradients
from benchmarks.timing import Step, ignore, wait_for

_MIB = 2**20
_PEAK_STEPS = 3


def allocated_mib(device: torch.device) -> float | None:
    """MiB in live tensors on `device`; None where nobody counts them (CPU)."""
    if device.type != "cuda":
        return None
    wait_for(device)
    return float(torch.cuda.memory_allocated(device)) / _MIB


def held_mib(step: Step, device: torch.device, before: float | None) -> dict[str, float | None]:
    """MiB that one step holds at the end of each of its phases, above `before`."""
    found: dict[str, float | None] = {}

    def look(ended: str) -> None:
        now = allocated_mib(device)
        found[ended] = None if now is None or before is None else now - before

    step(look)
    return found


def peak_mib(step: Step, device: torch.device, before: float | None) -> float | None:
    """The most MiB at any moment of some steps that nothing interrupts.

    With memory that was given up and that a stream has still to get done with.
    """
    if before is None:
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_PEAK_STEPS):
        step(ignore)
    wait_for(device)
    return float(torch.cuda.memory_stats(device)["active_bytes.all.peak"]) / _MIB - before


def gradient_error(
    step: Step, engine: Any, reference: Sequence[Tensor], phase: str, device: torch.device
) -> float:
    """How far the gradients of one step are off at the end of its `phase`."""
    errors = []

    def look(ended: str) -> None:
        if ended == phase:
            wait_for(device)  # reduction has a stream of its own
            errors.append(gradients.relative_error(gradients.full_gradients(engine), reference))

    step(look)
    (error,) = errors
    return error
