"""Cases of the suite on real GPUs: one process per GPU, NCCL, and streams that really overlap."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Verdict(NamedTuple):
    """Whether a case is right on this rank, and what to print of it."""

    right: bool
    found: str


def main(cases: Iterable[tuple[Any, Callable[[], Verdict]]]) -> int:
    """Run named cases under torchrun, a line for each on rank 0; 1 if any is wrong on any rank."""
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    wrong = total = 0
    for name, case in cases:
        verdict = case()
        right = torch.tensor(int(verdict.right), device="cuda")
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        wrong += not right
        total += 1
        if dist.get_rank() == 0:
            print("ok   " if right else "WRONG", verdict.found[:200], name, flush=True)
    if dist.get_rank() == 0:
        print(f"{wrong} wrong of {total}")
    dist.destroy_process_group()
    return int(wrong > 0)
