"""The suite's gradient cases on real GPUs, with streams and NCCL.

    torchrun --nproc-per-node 2 -m tests.zero3_retain.on_gpus

Needs CUDA, DeepSpeed and this project importable. Prints one line per case on rank 0 and exits
with 1 if any case differs from plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests import gpus
from tests.zero3_retain.cases import train
from tests.zero3_retain.test_gradients import (
    GRAPHS,
    OFFLOADED_ALL,
    OFFLOADED_OPTIMIZER,
    PREFETCH,
    ROUNDING,
    STAGES,
)

#: float32 on a GPU: other kernels for other shapes, sums in another order.
TOLERANCE = {"float32": 1e-5, **ROUNDING}
OVERLAP = {"zero": {"overlap_comm": True}}
FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero": {"overlap_comm": True}}
BFLOAT16 = {"bf16": {"enabled": True}, "zero": {"overlap_comm": True}}


def cases() -> Iterator[dict[str, Any]]:
    for stage in STAGES:
        for zero in (False, True):
            yield {"stage": stage, "zero": zero, "settings": OVERLAP}
        for style in ("scale", "torch"):
            yield {"stage": stage, "style": style, "backwards": 3, "settings": OVERLAP}
        yield {"stage": stage, "micro_steps": 2, "settings": OVERLAP}
        yield {"stage": stage, "settings": OFFLOADED_OPTIMIZER}
        yield {"stage": stage, "zero": True, "settings": OFFLOADED_OPTIMIZER}
        yield {"stage": stage, "dtype": "bfloat16", "settings": BFLOAT16}
        yield {"stage": stage, "dtype": "float16", "settings": FLOAT16}
        yield {"stage": stage, "dtype": "float16", "style": "scale", "settings": FLOAT16}
    yield {"settings": OFFLOADED_ALL}
    yield {"settings": PREFETCH, "steps": 5, "backwards": 3}
    for graph in GRAPHS:
        yield {"model": graph, "settings": OVERLAP}
        yield {"model": graph, "style": "torch", "zero": True, "settings": OVERLAP}


def judge(case: dict[str, Any]) -> gpus.Verdict:
    outcome = train(**case)
    close = outcome.difference <= TOLERANCE[case.get("dtype", "float32")] < outcome.moved
    right = close and not outcome.error and not any(outcome.available)
    return gpus.Verdict(right, f"{outcome.difference:.1e} {outcome.error}")


if __name__ == "__main__":
    sys.exit(gpus.main((case, partial(judge, case)) for case in cases()))
