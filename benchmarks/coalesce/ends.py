"""Where each row's training ends, against native's: parameters after some steps."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.coalesce.measure import PATCH
from benchmarks.coalesce.modes import NATIVE, Mode
from benchmarks.engines import free, patch
from benchmarks.gradients import relative_error
from benchmarks.micro_batches import Workload
from benchmarks.timing import ignore

_STEPS = 3


@dataclass(frozen=True)
class End:
    """What became of one row on an engine of its own."""

    error: str | None = None  # the exception that ended it
    difference: float | None = None  # to native's parameters, over the way that these went


def ends(
    workload: Workload, stage: int, modes: Sequence[Mode], device: torch.device
) -> dict[str, End]:
    """Train with each mode from the same start; a mode that raises leaves no engine behind."""
    found: dict[str, End] = {}
    native: list[Tensor] | None = None
    # Native first: the others are compared as they come, and two copies of a model are enough.
    for mode in sorted(modes, key=lambda mode: mode.name != NATIVE):
        try:
            update = _update(workload, stage, mode, device)
        except Exception as error:
            found[mode.name] = End(error=f"{type(error).__name__}: {error}")
            if not mode.may_raise(str(error)):
                traceback.print_exc()
        else:
            if mode.name == NATIVE:
                native = update
            difference = None if native is None else relative_error(update, native)
            found[mode.name] = End(difference=difference)
        free(device)
    return found


def _update(workload: Workload, stage: int, mode: Mode, device: torch.device) -> list[Tensor]:
    """How far each parameter moved in a few steps; float32."""
    from deepspeed.utils import safe_get_full_fp32_param

    start = [param.detach().float() for param in workload.model(device).parameters()]
    micro_batches = workload.data(device)
    with patch(PATCH, mode.patched), workload.engine_to_compare(stage, device) as engine:
        for _ in range(_STEPS):
            mode.step(engine, micro_batches, ignore)
        return [
            safe_get_full_fp32_param(param).to(device) - origin
            for param, origin in zip(engine.module.parameters(), start, strict=True)
        ]
