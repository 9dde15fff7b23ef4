"""Runs the ranks of a proof, two for each side: `python -m ... FILE SIDE ...`.

On a CPU the ranks are forks of one process, which imports DeepSpeed once; on GPUs they are spawned,
since a fork cannot use CUDA if its parent did. The output of a rank goes to a file `SIDE.RANK`
beside the script. All ranks are killed when the standard input closes: it is a pipe from `prove`,
which may be killed itself.
"""

import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ds_patches.core import api

RANKS = 2


def main(script: Path, sides: list[str]) -> None:
    if not os.fork():
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    is_cpu = os.environ["DS_ACCELERATOR"] == "cpu"
    if is_cpu:
        _prepare()
    from torch.multiprocessing.spawn import ProcessException, start_processes

    start: Any = partial(start_processes, nprocs=RANKS, join=False)
    method = "fork" if is_cpu else "spawn"
    contexts = [start(_run_rank, (script, side), start_method=method) for side in sides]
    for context in contexts:
        # After an error of one rank this also ends the other, which would wait for it.
        with suppress(ProcessException):
            while not context.join():
                pass


def _prepare() -> None:
    """Import the modules that all ranks on a CPU use, and make DeepSpeed act as on GPUs."""
    import deepspeed.ops
    import torch._dynamo  # noqa: F401  # imported by every optimizer, which takes seconds
    from deepspeed.accelerator import get_accelerator

    # On a CPU, DeepSpeed compiles a collective for half a minute if this op is compatible.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # With free memory, 0.18.7 to 0.18.9 keep a graph of the parameters, with which gloo fails.
    get_accelerator().available_memory = lambda device_index=None: 0


def _run_rank(rank: int, script: Path, side: str) -> None:
    """Run the script as one rank of a side's process group."""
    with script.with_name(f"{side}.{rank}").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        import torch

        is_cpu = os.environ["DS_ACCELERATOR"] == "cpu"
        is_shared = not is_cpu and torch.cuda.device_count() == 1
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(0 if is_shared else rank)}
        if is_shared:  # NCCL refuses a GPU to a second rank of a host: each has its own host id
            alone = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            os.environ |= {**alone, "NCCL_IB_DISABLE": "1"}
        store = f"file://{script.with_name(f'{side}.store')}"
        backend = "gloo" if is_cpu else "nccl"
        torch.distributed.init_process_group(backend, store, rank=rank, world_size=RANKS)
        if side == "patched":
            api.apply_all()
        sys.argv = [str(script), "PyTorch" if side == "PyTorch" else "DeepSpeed"]
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
