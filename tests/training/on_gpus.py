"""Cases of the suite on real GPUs, with streams and NCCL, one process for each GPU.

    torchrun --nproc-per-node 2 -m tests.training.on_gpus zero3_retain
    torchrun --nproc-per-node 2 -m tests.training.on_gpus coalesce
    torchrun --nproc-per-node 2 -m tests.training.on_gpus accumulation

Needs CUDA, DeepSpeed, pytest and this project importable. Prints one line per case on rank 0 and
exits with 1 if any case differs from plain PyTorch on any rank.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.coalesce import test_failure as failures
from tests.coalesce import test_gather_once as gathering
from tests.coalesce.loops import several_backwards as window
from tests.scripts import experts, unsynced
from tests.training.options import (
    BF16,
    BF16_SUMS,
    FP16,
    OFFLOADED,
    OFFLOADED_ALL,
    OVERLAP,
    ROUNDING,
    Options,
)
from tests.training.run import Script, run
from tests.zero3_retain.test_gradients import GRAPHS, PREFETCH, several_backwards

STAGES = (1, 2, 3)
#: float32 on a GPU: other kernels for other shapes, sums in another order.
TOLERANCE = {**ROUNDING, "float32": 1e-5}


class Case(NamedTuple):
    script: Script
    options: Options
    patch: str


def of_zero3_retain() -> Iterator[Case]:
    def case(zeroed: bool = False, backwards: int = 2, **options: Any) -> Case:
        script = partial(several_backwards, backwards=backwards, zero=zeroed)
        return Case(script, Options(**options), "zero3_retain")

    for stage in STAGES:
        for zero in (False, True):
            yield case(zero, stage=stage, **OVERLAP)
        for style in ("scale", "torch"):
            yield case(backwards=3, stage=stage, style=style, **OVERLAP)
        yield case(stage=stage, micro_steps=2, **OVERLAP)
        for zero in (False, True):
            yield case(zero, stage=stage, **OFFLOADED)
        yield case(stage=stage, **BF16, **OVERLAP)
        for style in ("engine", "scale"):
            yield case(stage=stage, style=style, **FP16, **OVERLAP)
    yield case(**OFFLOADED_ALL)
    yield case(backwards=3, steps=5, **PREFETCH)
    for graph in GRAPHS:
        yield case(model=graph, **OVERLAP)
        yield case(True, model=graph, style="torch", **OVERLAP)


def of_coalesce() -> Iterator[Case]:
    """Windows; one rank that raises alone, so that the other is told, and both go on; no_sync()."""

    def case(script: Script = window, **options: Any) -> Case:
        return Case(script, Options(**options), "coalesce")

    for stage in STAGES:
        for style in ("engine", "torch"):
            yield case(stage=stage, style=style, **OVERLAP)
        yield case(stage=stage, zero={"overlap_comm": True, "reduce_scatter": False})
        yield case(stage=stage, **OFFLOADED)
        for half in (FP16, BF16, BF16_SUMS) if stage > 1 else (FP16, BF16):
            yield case(stage=stage, **half, **OVERLAP)
        for model in ("FrozenTrunk", "TiedEmbedding", "NonReentrant"):
            yield case(stage=stage, model=model, **OVERLAP)
    for more in ({}, OVERLAP, OFFLOADED_ALL, gathering.SMALL_PREFETCH):
        yield case(gathering.gathers_once, stage=3, steps=4, **more)
    broken = {"model": "Breakable", "steps": 4}
    for place in failures.PLACES:
        script = partial(failures.fail_and_go_on, place=place, failing=(1,))
        for stage in (1, 2):
            yield case(script, stage=stage, **broken, **OVERLAP)
        yield case(partial(failures.all_gathered, place=place), stage=3, **broken)
    for stage in STAGES:
        for script in (unsynced.unsynced, unsynced.synced_in_between):
            yield case(script, stage=stage, **OVERLAP)


def of_accumulation() -> Iterator[Case]:
    """Ranks that use different parameters."""
    for stage in (1, 2):
        for more in ({}, OVERLAP, OFFLOADED, BF16, FP16):
            for model in ("Routed", "RoutedUnevenly"):
                yield Case(experts.routed, Options(stage, model=model, **more), "accumulation")
        for model in ("RoutedReentrant", "RoutedNonReentrant"):
            for script in (experts.routed_losses_apart, experts.routed_micro_steps):
                micro_steps = script.options.micro_steps
                options = Options(stage, model=model, micro_steps=micro_steps, **OVERLAP)
                yield Case(script, options, "accumulation")
        for size in (40, 10**6):
            zero = {"overlap_comm": True, "reduce_bucket_size": size}
            options = Options(stage, model="RoutedUnevenly", steps=30, zero=zero)
            yield Case(experts.routed, options, "accumulation")


CASES = {"accumulation": of_accumulation, "zero3_retain": of_zero3_retain, "coalesce": of_coalesce}


def judge(case: Case) -> tuple[bool, str]:
    outcome = run(*case)
    close = outcome.difference <= TOLERANCE[case.options.dtype] < outcome.moved
    whole = case.patch == "zero3_retain" and any(outcome.available)
    return close and not outcome.error and not whole, f"{outcome.difference:.1e} {outcome.error}"


def main(patch: str) -> int:
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    wrong = total = 0
    for case in CASES[patch]():
        mine, found = judge(case)
        right = torch.tensor(int(mine), device="cuda")
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        wrong += not right
        total += 1
        if dist.get_rank() == 0:
            shown = getattr(case.script, "keywords", case.script), case.options.shows
            print("ok   " if right else "WRONG", found[:200], *shown, flush=True)
    if dist.get_rank() == 0:
        print(f"{wrong} wrong of {total}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
