"""What a rank holds after each backward of a ZeRO-3 step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.probes import allocated_mib
from benchmarks.timing import Step


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
