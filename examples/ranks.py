"""Ranks of an example: how they are started, and brought up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from typing import TextIO

RANKS = 2
_TAIL_LINES = 60
# A rank that waits longer has lost the others.
_PATIENCE = timedelta(minutes=3)


def start(module: str, *arguments: str) -> int:
    """Run a module on two CPU ranks; what they print beside `join`'s file is shown if they fail."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", module, *arguments],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stderr=printed,
        )
        if done.returncode:
            printed.seek(0)
            print(*printed.readlines()[-_TAIL_LINES:], sep="", end="", file=sys.stderr)
    return done.returncode


def join() -> TextIO:
    """Bring this rank up; returns where the first one is to print what people read.

    All else, DeepSpeed's and gloo's words too, goes to standard error.
    """
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # torch's, for the collectives that DeepSpeed calls: they would bury what explains a failure.
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # On CPU, DeepSpeed compiles a shared-memory all-reduce with g++ (half a minute) that serves
    # tensor-parallel inference only. This table is its own switch for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(timeout=_PATIENCE)
    return own if os.environ["RANK"] == "0" else open(os.devnull, "w")
