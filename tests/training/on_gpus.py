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
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.accumulation import test_experts as of_experts
from tests.coalesce import test_blocks, test_failure, test_gather_once, test_no_sync
from tests.training.cases import Case
from tests.training.options import OVERLAP, ROUNDING
from tests.training.run import run
from tests.zero3_retain import test_gradients

#: float32 on a GPU: other kernels for other shapes, sums in another order.
TOLERANCE = {**ROUNDING, "float32": 1e-5}
#: Tests whose cases are tables.
TABLES: dict[str, tuple[Any, ...]] = {
    "zero3_retain": (test_gradients.test_options, test_gradients.test_graphs),
    "coalesce": (
        test_blocks.test_a_block_is_a_sum,
        test_gather_once.test_options,
        test_failure.test_the_next_step_is_as_if_it_had_not_happened,
        test_no_sync.test_the_next_synced_backward_reduces_the_sum,
    ),
    "accumulation": (of_experts.test_batches_of_one_to_three_experts,),
}


def cases_of(patch: str) -> Iterator[Case]:
    """Those that this release has, with communication beside the backward."""
    marks = [mark for test in TABLES[patch] for mark in test.pytestmark]
    for param in (param for mark in marks for param in mark.args[1]):
        if not any(mark.name == "skipif" and mark.args[0] for mark in param.marks):
            (case,) = param.values
            zero = {**OVERLAP["zero"], **case.options.zero}
            yield replace(case, options=replace(case.options, zero=zero))


def judge(case: Case) -> tuple[bool, str]:
    # Overlap is stock's own race: a wrong result would be nobody's.
    outcome = run(case.script, case.options, *case.patches, "stream_safety")
    close = outcome.difference <= TOLERANCE[case.options.dtype] < outcome.moved
    # A block that gathers once keeps them until its end.
    whole = case.patches == ("zero3_retain",) and any(outcome.available)
    return close and not outcome.error and not whole, f"{outcome.difference:.1e} {outcome.error}"


def main(patch: str) -> int:
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    wrong = total = 0
    for case in cases_of(patch):
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, judge(case))
        right, found = min(ranks)
        wrong += not right
        total += 1
        if dist.get_rank() == 0:
            print("ok   " if right else "WRONG", found[:200], case.shows, flush=True)
    if dist.get_rank() == 0:
        print(f"{wrong} wrong of {total}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
