"""One rank of the comparison."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TextIO

STAGES = (1, 2, 3)


def main(steps: int) -> int:
    """Returns 0 if every run with blocks is right, 1 if one is not; alike on all ranks."""
    shown = _own_standard_output()
    device = _join()

    import torch.distributed as dist

    import ds_patches
    from examples.gradcache import curves
    from examples.gradcache.table import Table

    work = curves.Work(steps)
    table = Table(work, device, shown)
    plain = curves.full_batch(work)
    table.show("plain PyTorch, one batch", plain)
    for stage in STAGES:
        table.show(f"ZeRO-{stage}, stock", curves.cached(stage, work, windows=False), plain)
    ds_patches.apply("coalesce")
    faults = [] if plain.falls() else ["plain PyTorch does not learn"]
    for stage in STAGES:
        curve = curves.cached(stage, work, windows=True)
        table.show(f"ZeRO-{stage}, one block", curve, plain)
        faults += [f"ZeRO-{stage}: {fault}" for fault in curve.faults(plain)]
    table.verdict(faults)
    dist.destroy_process_group()
    return int(bool(faults))


def _own_standard_output() -> TextIO:
    """Where the table goes; all else, DeepSpeed's and gloo's words too, goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def _join() -> str:
    """Import DeepSpeed and bring the process group up; returns the name of this rank's device."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # On CPU, DeepSpeed compiles a shared-memory all-reduce with g++ (half a minute) that serves
    # tensor-parallel inference only. This table is its own switch for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    return str(get_accelerator().current_device_name())
