"""What is trained between two optimizer steps, and an engine of each stage for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engines import DTYPE, SEED, blocks, config, engine_around, mlp
from benchmarks.gradients import Forward

MicroBatches = tuple[Tensor, ...]

# Enough for real updates, too little for a run of some hundred steps to leave the weights that
# the first step saw: every row measures the same numbers.
_LEARNING_RATE = 1e-6


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def plain_backwards(micro_batches: MicroBatches, forward: Forward, micro_steps: int = 1) -> None:
    """The backwards of one step, in plain PyTorch, each of a part of its `micro_steps`."""
    for inputs in micro_batches:
        (loss_of(forward(inputs)) / micro_steps).backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Workload:
    """`backwards` micro batches of `batch` rows a step, through `layers` Linear layers.

    in_blocks: ``engines.blocks`` of six layers each; otherwise ``engines.mlp``.
    micro_steps: what DeepSpeed calls gradient accumulation steps.
    """

    layers: int
    width: int
    batch: int
    backwards: int
    reduce_bucket_size: int  # elements
    overlap_comm: bool = True
    in_blocks: bool = False
    micro_steps: int = 1

    def model(self, device: torch.device) -> nn.Sequential:
        if self.in_blocks:
            return blocks(self.layers // 6, self.width, device)
        return mlp(self.layers, self.width, device)

    def data(self, device: torch.device) -> MicroBatches:
        """This rank's inputs; every rank has its own."""
        generator = torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())
        shape = (self.batch, self.width)
        return tuple(
            torch.randn(shape, generator=generator, dtype=DTYPE, device=device)
            for _ in range(self.backwards)
        )

    def engine(self, stage: int, device: torch.device) -> AbstractContextManager[Any]:
        """With AdamW: the engine that is timed."""
        model = self.model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        return engine_around(model, optimizer, self._config(stage))

    def engine_to_compare(self, stage: int, device: torch.device) -> AbstractContextManager[Any]:
        """With SGD, whose parameters follow the size of a gradient; Adam divides it away."""
        model = self.model(device)
        # The loss is a mean over `width` outputs, so a gradient shrinks as the model grows.
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-5 * self.width)
        return engine_around(model, optimizer, self._config(stage))

    def _config(self, stage: int) -> dict[str, Any]:
        return config(
            self.batch,
            self.micro_steps,
            stage=stage,
            overlap_comm=self.overlap_comm,
            reduce_bucket_size=self.reduce_bucket_size,
            stage3_param_persistence_threshold=0,
        )
