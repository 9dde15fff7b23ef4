"""The same training with two Ray actors as its ranks; MASTER_ADDR and MASTER_PORT are set."""

import os
import sys
from pathlib import Path

import ray


@ray.remote(num_cpus=1)
class Rank:
    def train(self, folder: Path, rank: int, world: int) -> None:
        import train

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        train.main(folder)


ray.init(runtime_env={"env_vars": {"DS_PATCHES": "all"}})
ranks = [Rank.remote() for _ in range(2)]
folder = Path(sys.argv[1]).absolute()
ray.get([rank.train.remote(folder, number, len(ranks)) for number, rank in enumerate(ranks)])
