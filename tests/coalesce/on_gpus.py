"""Windows on real GPUs, with streams and NCCL.

    torchrun --nproc-per-node 2 -m tests.coalesce.on_gpus

Needs CUDA, DeepSpeed, pytest and this project importable. Prints one line per case on rank 0 and
exits with 1 if any case differs from plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests import gpus
from tests.coalesce import cases, micro_steps, test_failure, test_gather_once
from tests.zero3_retain import models
from tests.zero3_retain.on_gpus import BFLOAT16, FLOAT16, OVERLAP, TOLERANCE
from tests.zero3_retain.test_gradients import OFFLOADED_ALL, OFFLOADED_OPTIMIZER

STAGES = [1, 2, 3]
Outcomes = Callable[[], cases.Outcome]
FP32_SUMS = {**BFLOAT16, "data_types": {"grad_accum_dtype": "fp32"}}


def windows() -> Iterator[tuple[dict[str, Any], Outcomes]]:
    def train(**case: Any) -> tuple[dict[str, Any], Outcomes]:
        return case, partial(cases.train, **case)

    for stage in STAGES:
        for style in ("engine", "torch"):
            yield train(stage=stage, style=style, settings=OVERLAP)
        yield train(stage=stage, settings=OVERLAP, options={"flush": "upstream"})
        yield train(stage=stage, settings=OVERLAP, options={"handshake": "store"})
        yield train(stage=stage, settings=OFFLOADED_OPTIMIZER)
        yield train(stage=stage, dtype="float16", settings=FLOAT16)
        for settings in (BFLOAT16, FP32_SUMS) if stage > 1 else (BFLOAT16,):
            yield train(stage=stage, dtype="bfloat16", settings=settings)
        for model in ("FrozenTrunk", "TiedEmbedding", "NonReentrant"):
            yield train(stage=stage, model=model, settings=OVERLAP)
    for settings in ({}, OVERLAP, OFFLOADED_ALL, test_gather_once.SMALL_PREFETCH):
        yield train(stage=3, settings=settings, gather_once=True, steps=4)


def failures() -> Iterator[tuple[dict[str, Any], Outcomes]]:
    """One rank raises alone; the other is told, and both go on."""
    for place in test_failure.PLACES:
        for stage in (1, 2):
            name = {"stage": stage, "raises": place}
            arguments = (stage, place, (1,), "engine")
            yield name, partial(test_failure.outcome, *arguments, settings=OVERLAP)
        name = {"stage": 3, "raises": place, "gather_once": True}
        yield name, partial(test_failure.alone_with_gather_once, place)


def steps() -> Iterator[tuple[dict[str, Any], Outcomes]]:
    """Outside windows."""
    for stage in STAGES:
        for script in (micro_steps.all_but_the_last_unsynced, micro_steps.synced_in_between):
            case = {"stage": stage, "settings": OVERLAP}
            yield {**case, "no_sync": script.__name__}, partial(micro_steps.outcome, script, **case)


def judge(case: dict[str, Any], run: Outcomes) -> gpus.Verdict:
    outcome = run()
    tolerance = TOLERANCE[case.get("dtype", "float32")]
    right = not outcome.error and outcome.difference <= tolerance < outcome.moved
    return gpus.Verdict(right, f"{outcome.difference:.1e} {outcome.error}")


def everything() -> Iterator[tuple[Any, Callable[[], gpus.Verdict]]]:
    assert models.device().type == "cuda"
    for part in (windows, failures, steps):
        for case, run in part():
            yield case, partial(judge, case, run)


if __name__ == "__main__":
    sys.exit(gpus.main(everything()))
