"""The ranks of a benchmark that torchrun starts."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

# A rank that waits longer has lost the others: end with a message, not at a job's time limit.
_PATIENCE = timedelta(minutes=2)


def join(kind: str) -> torch.device:
    """Bring the process group up; `kind`: cuda or cpu. Nothing of DeepSpeed is compiled."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    # On CPU it would build a shared-memory all-reduce with g++; this table is its own switch.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    upstream = logging.getLogger("DeepSpeed")
    upstream.setLevel(logging.WARNING)
    # Said of torch's own optimizers, by every engine.
    upstream.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    # The patch comes and goes with every block: what applying has to note is no news here.
    logging.getLogger("ds_patches").addFilter(lambda record: record.levelno > logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch deprecates, with a warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if kind == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if kind == "cpu" else "nccl", timeout=_PATIENCE)
    return device


def leave(failures: Iterable[str]) -> int:
    """Say what went wrong and take the process group down; the exit status."""
    wrong = list(failures)
    for failure in wrong:
        say(f"FAILED: {failure}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if wrong else 0


def say(*lines: str) -> None:
    """Print on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)
