"""The model that is trained, its data, and a ZeRO-3 engine around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DTYPE = torch.bfloat16
_SEED = 1234
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

    def model(self, device: torch.device) -> nn.Sequential:
        """The same weights on every rank and at every call."""
        torch.manual_seed(_SEED)
        with device:
            linears = [
                nn.Linear(self.width, self.width, bias=False, dtype=DTYPE)
                for _ in range(self.layers)
            ]
        for linear in linears:
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        return nn.Sequential(*(module for linear in linears for module in (linear, nn.ReLU())))

    def data(self, rank: int, device: torch.device) -> Batch:
        """This rank's batch; every rank has its own."""
        generator = torch.Generator(device).manual_seed(_SEED + 1 + rank)
        inputs, *targets = (
            torch.randn(self.batch, self.width, generator=generator, dtype=DTYPE, device=device)
            for _ in range(1 + self.losses)
        )
        return Batch(inputs, tuple(targets))

    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with all that this depends on and that has moved."""
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": self.width**2,
                "sub_group_size": 10**9,
                "stage3_prefetch_bucket_size": self.prefetch_bucket,
                "stage3_param_persistence_threshold": self.persistence,
                "stage3_max_live_parameters": 10**9,
                "stage3_max_reuse_distance": self.max_reuse_distance,
                "memory_efficient_linear": True,
            },
        }

    @contextmanager
    def engine(self, device: torch.device) -> Iterator[Any]:
        """A ``DeepSpeedEngine`` that is destroyed afterwards, whatever happens in between."""
        import deepspeed

        model = self.model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self.config())
        try:
            yield engine
        finally:
            engine.destroy()
            # DeepSpeed's caches keep a destroyed engine alive. Its tensors need not stay with it.
            for holder in (*model.parameters(), engine.optimizer):
                vars(holder).clear()


def free(device: torch.device) -> None:
    """Give back what a dropped engine held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
