"""Starting and initializing the ranks of an example."""

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
# If a collective takes longer, another rank has failed.
_PATIENCE = timedelta(minutes=3)


def start(module: str, *arguments: str) -> int:
    """Run a module on two CPU ranks, and print their stderr if they fail. Return the status."""
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
    """Initialize this rank, and return the file to which rank 0 prints results.

    All other output, also DeepSpeed's and gloo's, goes to stderr.
    """
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # PyTorch warns about collectives that DeepSpeed calls; the warnings would hide an error.
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # On CPU, DeepSpeed compiles a shared-memory all-reduce with g++ (half a minute) for
    # tensor-parallel inference only. This entry of its table disables that.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(timeout=_PATIENCE)
    return own if os.environ["RANK"] == "0" else open(os.devnull, "w")
