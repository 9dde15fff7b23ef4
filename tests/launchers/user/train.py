"""A user's training script: two backwards over one forward of a ZeRO-3 model.

It does nothing about patches, and stock DeepSpeed crashes at the second backward: a run that ends
was patched. Only then it asks ds_patches, for its report, `FOLDER/RANK.json`.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor, nn

# On CPU, DeepSpeed compiles an all-reduce for half a minute that only inference needs.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH = 16


class TwoHeads(nn.Module):
    """A trunk with two heads, for two losses over one forward of it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.first(x), self.second(x)


def main(folder: Path) -> None:
    deepspeed.init_distributed()
    network = TwoHeads()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config="zero3.json")
    first, second = engine(torch.ones(2, WIDTH))
    engine.backward(first.sum(), retain_graph=True)
    engine.backward(second.sum())
    engine.step()
    report(folder)
    dist.destroy_process_group()


def report(folder: Path) -> None:
    import ds_patches

    state = {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "live": [name for name, status in ds_patches.status().items() if status.live],
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(state), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", help="the deepspeed launcher gives it")
    main(parser.parse_args().folder)
