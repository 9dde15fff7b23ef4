"""The ranks of a proof, two of each side: `python -m ds_patches.desk.proofs.ranks FILE SIDE ...`.

They are forks of one process, which has imported DeepSpeed once for all of them. What a rank prints
goes to a file beside the script: `SIDE.RANK`. All end when the standard input does: it is a pipe of
`prove`, which may be killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

from ds_patches.core import api

RANKS = 2


def log(script: Path, side: str, rank: int) -> Path:
    return script.with_name(f"{side}.{rank}")


def main(script: Path, sides: list[str]) -> None:
    if not os.fork():
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    import deepspeed.ops
    import torch._dynamo  # noqa: F401  # which every optimizer imports, for seconds
    from deepspeed.accelerator import get_accelerator

    # On a CPU, DeepSpeed compiles a collective for half a minute, unless its own table says no.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Where memory suffices, 0.18.7 to 0.18.9 keep a graph of the parameters, at which gloo fails.
    get_accelerator().available_memory = lambda device_index=None: 0
    ranks = {}
    for side in sides:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(RANKS):
            if not (process := os.fork()):
                _be(script, side, rank, port)
            ranks[process] = side
    while ranks:
        ended, status = os.wait()
        side = ranks.pop(ended)
        for other in [one for one, its in ranks.items() if status and its == side]:
            os.kill(other, signal.SIGKILL)  # it would wait for the one that failed


def _be(script: Path, side: str, rank: int, port: int) -> None:
    """Be a rank, and never return."""
    status = 1
    try:
        with log(script, side, rank).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": RANKS}
        world |= {"RANK": rank, "LOCAL_RANK": rank}
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
