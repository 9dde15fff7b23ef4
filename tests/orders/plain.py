"""Plain PyTorch goes through an order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.orders.sides import Side


class Plain(Side):
    """In single precision: each engine is an optimizer."""

    dtype = torch.float32
    came = failed = False  # a backward since the last step(); it raised

    def model(self) -> nn.Module:
        return super().model().float()

    def build(self, module: nn.Module) -> Any:
        module = _Own(module)
        module.optimizer = torch.optim.SGD(module.parameters(), lr=self.options.rates[0])
        return module

    def run_backward(self, loss: Tensor, retain: bool) -> None:
        self.came, self.failed = True, False
        (loss / self.options.micro_steps).backward(retain_graph=retain)

    def plain_backward(self, loss: Tensor) -> None:
        self.run_backward(loss, False)

    def boomed(self) -> None:
        self.came = self.failed = True
        self._drop()

    def _drop(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def zero_grad(self) -> None:
        """Where a micro step has just been counted, stages 2 and 3 mean to go on."""
        if self.came or not (self.options.stage > 1 or self.options.sums):
            self._drop()

    optimizer_zero_grad = zero_grad

    def take_step(self, engine: Any, whole: bool) -> None:
        self.came = False
        if not whole:
            return
        if self.failed:
            raise RuntimeError("a step after a backward that raised is refused, as documented")
        for param in engine.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            if "sum" not in self.order.settings:
                param.grad /= dist.get_world_size()
        engine.optimizer.step()
        engine.zero_grad()

    @contextmanager
    def window(self, drops: bool = False) -> Iterator[None]:
        params = [p for module in self.modules for p in module.parameters()]
        before = [None if p.grad is None else p.grad.clone() for p in params]
        try:
            yield
        finally:
            if drops:
                for param, grad in zip(params, before, strict=True):
                    param.grad = grad

    def patch(self, *_: str) -> None:
        """Nothing, and so do others that are of engines alone."""

    destroy = fails = save = patch


class _Own(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)
