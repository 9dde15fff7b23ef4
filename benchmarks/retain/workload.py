"""The model that is trained, its data, and a ZeRO-3 engine around it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engines import DTYPE, SEED, config, engine_around, mlp

# Enough for real updates, too little for a run of some hundred steps to leave the weights that
# the first step saw: every row measures the same numbers.
_LEARNING_RATE = 1e-6


class Batch(NamedTuple):
    """What one rank trains on: inputs and one target per loss, each [batch, width]."""

    inputs: Tensor
    targets: tuple[Tensor, ...]

    def loss(self, outputs: Tensor, index: int) -> Tensor:
        """A scalar whose graph holds nothing that the model's graph does not hold already."""
        return (outputs * self.targets[index]).mean()


@dataclass(frozen=True)
class Workload:
    """`layers` times Linear(`width`, bias=False) + ReLU in bf16; sizes in elements."""

    layers: int
    width: int
    batch: int
    losses: int
    prefetch_bucket: int
    max_reuse_distance: int
    persistence: int

    def data(self, rank: int, device: torch.device) -> Batch:
        """This rank's batch; every rank has its own."""
        generator = torch.Generator(device).manual_seed(SEED + 1 + rank)
        inputs, *targets = (
            torch.randn(self.batch, self.width, generator=generator, dtype=DTYPE, device=device)
            for _ in range(1 + self.losses)
        )
        return Batch(inputs, tuple(targets))

    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with all that this depends on and that has moved."""
        return config(
            self.batch,
            stage=3,
            reduce_bucket_size=self.width**2,
            sub_group_size=10**9,
            stage3_prefetch_bucket_size=self.prefetch_bucket,
            stage3_param_persistence_threshold=self.persistence,
            stage3_max_live_parameters=10**9,
            stage3_max_reuse_distance=self.max_reuse_distance,
            memory_efficient_linear=True,
        )

    def engine(self, device: torch.device) -> AbstractContextManager[Any]:
        """A ``DeepSpeedEngine``, destroyed afterwards."""
        model = mlp(self.layers, self.width, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        return engine_around(model, optimizer, self.config())
