"""The ranks of a proof, two of each side: `python -m ... FILE SIDE ...`.

On a CPU they are forks of one process, which has imported DeepSpeed once for all of them; no fork
can use CUDA where an import did. What a rank prints goes to a file beside the script: `SIDE.RANK`.
All end when the standard input does: it is a pipe of `prove`, which may be killed.
"""

from __future__ import annotations

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
    # Here, and not in rank 0: a port that is only looked for may be taken until it is used.
    dist: Any = torch.distributed
    stores = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in sides]
    # A fork has a copy of what it finds open. Of a connection that another rank has to a store, the
    # store would hear after its end, and take that for what became of the next one.
    all_are_there = context.Event()
    ranks = {}
    for side, store in zip(sides, stores, strict=True):
        for rank in range(RANKS):
            args = (script, side, rank, store.port, all_are_there)
            process = context.Process(target=_be, args=args)
            process.start()
            ranks[process] = side
    all_are_there.set()
    while ranks:
        connection.wait([process.sentinel for process in ranks])
        for process in [one for one in ranks if one.exitcode is not None]:
            side = ranks.pop(process)
            for other in [one for one, its in ranks.items() if process.exitcode and its == side]:
                other.kill()  # it would wait for the one that failed


def _prepare() -> None:
    """Import what ranks on a CPU share, and have it do what it does on GPUs."""
    import deepspeed.ops
    import torch._dynamo  # noqa: F401  # which every optimizer imports, for seconds
    from deepspeed.accelerator import get_accelerator

    # On a CPU, DeepSpeed compiles a collective for half a minute, unless its own table says no.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Where memory suffices, 0.18.7 to 0.18.9 keep a graph of the parameters, at which gloo fails.
    get_accelerator().available_memory = lambda device_index=None: 0


def _be(script: Path, side: str, rank: int, port: int, all_are_there: Any) -> None:
    """Be a rank, and never return."""
    status = 1
    try:
        all_are_there.wait()
        with log(script, side, rank).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        world = {"MASTER_ADDR": HOST, "MASTER_PORT": port, "WORLD_SIZE": RANKS}
        world |= {"RANK": rank, "LOCAL_RANK": rank, **_sharing(rank)}
        # As of torchrun: rank 0 finds the store there and opens none.
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
    """Return what lets ranks share the only GPU, if there is one.

    NCCL refuses it to a second rank of a host, so each is told that it is on a host alone.
    """
    import torch

    if os.environ["DS_ACCELERATOR"] == "cpu" or torch.cuda.device_count() != 1:
        return {}
    alone = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
    return {"LOCAL_RANK": 0, **alone}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
