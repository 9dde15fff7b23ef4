"""Runs the ranks of a proof, two for each side: `python -m ... FILE SIDE ...`.

On a CPU the ranks are forks of one process, which imports DeepSpeed once; on GPUs they are spawned,
since a fork cannot use CUDA if its parent did. The output of a rank goes to a file `SIDE.RANK`
beside the script. All ranks are killed when the standard input closes: it is a pipe from `prove`,
which may be killed itself.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ds_patches.core import api

HOST = "127.0.0.1"
RANKS = 2


def log(script: Path, side: str, rank: int) -> Path:
    return script.with_name(f"{side}.{rank}")


def main(script: Path, sides: list[str]) -> None:
    if not os.fork():
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    is_cpu = os.environ["DS_ACCELERATOR"] == "cpu"
    if is_cpu:
        _prepare()
    import torch.distributed

    context: Any = multiprocessing.get_context("fork" if is_cpu else "spawn")
    # Opened here, not in rank 0: a port that is only probed may be taken before rank 0 opens it.
    dist: Any = torch.distributed
    stores = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in sides]
    # Ranks connect to the stores after all forks: a fork would inherit the open connections of
    # earlier ranks, and the store would mistake their end for that of a later connection.
    all_started = context.Event()
    ranks = {}
    for side, store in zip(sides, stores, strict=True):
        for rank in range(RANKS):
            args = (script, side, rank, store.port, all_started)
            process = context.Process(target=_run_rank, args=args)
            process.start()
            ranks[process] = side
    all_started.set()
    while ranks:
        connection.wait([process.sentinel for process in ranks])
        for process in [process for process in ranks if process.exitcode is not None]:
            side = ranks.pop(process)
            for peer in [
                p for p, its_side in ranks.items() if process.exitcode and its_side == side
            ]:
                peer.kill()  # it would wait for the rank that failed


def _prepare() -> None:
    """Import the modules that all ranks on a CPU use, and make DeepSpeed act as on GPUs."""
    import deepspeed.ops
    import torch._dynamo  # noqa: F401  # imported by every optimizer, which takes seconds
    from deepspeed.accelerator import get_accelerator

    # On a CPU, DeepSpeed compiles a collective for half a minute if this op is compatible.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # With free memory, 0.18.7 to 0.18.9 keep a graph of the parameters, with which gloo fails.
    get_accelerator().available_memory = lambda device_index=None: 0


def _run_rank(script: Path, side: str, rank: int, port: int, all_started: Any) -> None:
    """Run the script as one rank, and exit the process."""
    status = 1
    try:
        all_started.wait()
        with log(script, side, rank).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        world = {"MASTER_ADDR": HOST, "MASTER_PORT": port, "WORLD_SIZE": RANKS}
        world |= {"RANK": rank, "LOCAL_RANK": rank, **_sharing(rank)}
        # As torchrun sets them: rank 0 uses the open store and opens none itself.
        world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in world.items()})
        if side == "patched":
            api.apply_all()
        sys.argv = [str(script), "PyTorch" if side == "PyTorch" else "DeepSpeed"]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _sharing(rank: int) -> dict[str, Any]:
    """Return the variables with which ranks share the only GPU; {} if there is not exactly one.

    NCCL refuses a GPU to a second rank of the same host, so each rank has its own host id.
    """
    import torch

    if os.environ["DS_ACCELERATOR"] == "cpu" or torch.cuda.device_count() != 1:
        return {}
    alone = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
    return {"LOCAL_RANK": 0, **alone}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
