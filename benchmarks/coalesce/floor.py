"""What no way can be faster than: the backwards in plain PyTorch and one reduce-scatter.

No optimizer, no engine; the gradients of all parameters in one piece.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.engines import DTYPE
from benchmarks.micro_batches import MicroBatches, Workload, plain_backwards
from benchmarks.timing import Mark


class Floor:
    """A model, and a place for its reduced gradients."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._model = workload.model(device)
        self._params = list(self._model.parameters())
        ranks = dist.get_world_size()
        size = sum(param.numel() for param in self._params)
        self._sums = torch.zeros(-(-size // ranks) * ranks, dtype=DTYPE, device=device)
        self._share = torch.empty(self._sums.numel() // ranks, dtype=DTYPE, device=device)
        # torch 2.13 renamed it.
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def step(self, micro_batches: MicroBatches, mark: Mark) -> None:
        for param in self._params:
            param.grad = None
        plain_backwards(micro_batches, self._model)
        mark("backwards")
        gradients = [param.grad.view(-1) for param in self._params if param.grad is not None]
        torch.cat(gradients, out=self._sums[: sum(map(torch.numel, gradients))])
        self._reduce_scatter(self._share, self._sums)
        mark("exit")
