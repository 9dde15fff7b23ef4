"""What is read of a step besides its time: memory, gathered parameters, gradients, collectives.

Each takes a step of its own, so that reading never stands in a timed one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gradients
from benchmarks.timing import Step, ignore, wait_for
from benchmarks.workload import Batch

_MIB = 2**20
_COLLECTIVES = {"all_gather": r"all_?gather", "reduce_scatter": r"reduce_?scatter"}


def allocated_mib(device: torch.device) -> float | None:
    """MiB in live tensors on `device`; None where nobody counts them (CPU)."""
    if device.type != "cuda":
        return None
    wait_for(device)
    return float(torch.cuda.memory_allocated(device)) / _MIB


@dataclass(frozen=True)
class Held:
    """What this rank holds right after one backward."""

    after: str
    mib: float | None  # allocated since before the engine was built
    available: int  # parameters that are gathered and need not be
    in_flight: int  # parameters whose gather has begun


def held_after_backwards(
    step: Step, engine: Any, device: torch.device, before: float | None
) -> list[Held]:
    """One step, looked at after each of its backwards. `before`: MiB before the engine."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    held = []

    def look(phase: str) -> None:
        if not phase.startswith("backward"):
            return
        now = allocated_mib(device)
        statuses = Counter(p.ds_status for p in engine.module.parameters() if not p.ds_persist)
        held.append(
            Held(
                phase,
                None if now is None or before is None else now - before,
                statuses[ZeroParamStatus.AVAILABLE],
                statuses[ZeroParamStatus.INFLIGHT],
            )
        )

    step(look)
    return held


def peak_mib(step: Step, device: torch.device, before: float | None, steps: int) -> float | None:
    """The most MiB allocated at any moment of `steps` steps that nothing interrupts."""
    if before is None:
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step(ignore)
    wait_for(device)
    return float(torch.cuda.max_memory_allocated(device)) / _MIB - before


def gradient_error(
    step: Step,
    engine: Any,
    batch: Batch,
    summed: Sequence[int],
    last_backward: str,
    device: torch.device,
) -> tuple[float, float]:
    """Compare one step's gradients with plain PyTorch's over the losses `summed`.

    Returns the relative error, and for scale the error of a step that lost all but the last loss.
    """
    weights = gradients.full_weights(engine)
    reference = gradients.plain_gradients(weights, batch, summed)
    last_alone = gradients.plain_gradients(weights, batch, summed[-1:])
    errors = []

    def look(phase: str) -> None:
        if phase == last_backward:
            wait_for(device)  # reduction has a stream of its own
            full = gradients.full_gradients(engine)
            errors.append(gradients.relative_error(full, reference))

    step(look)
    (error,) = errors
    return error, gradients.relative_error(last_alone, reference)


def collectives(step: Step, device: torch.device) -> dict[str, int]:
    """How many collectives one step runs: NCCL kernels on a GPU, calls of c10d elsewhere."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    wait_for(device)
    with profile(activities=activities) as profiler:
        step(ignore)
        wait_for(device)
    where = "CUDA" if on_gpu else "CPU"
    names = [event.name for event in profiler.events() or () if event.device_type.name == where]
    # On the GPU's timeline the profiler also draws the calls: those are named "nccl:...".
    prefix = r"nccl(Dev)?Kernel\w*" if on_gpu else r"c10d::\w*"
    return {
        kind: sum(bool(re.match(prefix + pattern, name, re.IGNORECASE)) for name in names)
        for kind, pattern in _COLLECTIVES.items()
    }
