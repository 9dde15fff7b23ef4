"""The same training with ranks that this script spawns; MASTER_ADDR and MASTER_PORT are set."""

import os
import sys
from pathlib import Path

import torch.multiprocessing

RANKS = 2


def run(rank: int, folder: Path) -> None:
    import train

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    train.main(folder)


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(Path(sys.argv[1]),), nprocs=RANKS)
