"""Plain PyTorch goes through an order."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.stock import RELEASE
from tests.orders.sides import Side

#: DeepSpeed counts what comes to an engine in a backward; not so with fp32 sums at stage 1.
TELLS_OF_GRADIENTS = str(RELEASE) >= "0.18.5"


class Plain(Side):
    """In single precision: each engine is an optimizer."""

    dtype = torch.float32
    failed = False  # the last backward
    came: Sequence[nn.Module] = ()  # to these, a backward since the last step()
    zeroed: AbstractSet[nn.Parameter] = frozenset()  # since the last block began

    def model(self) -> nn.Module:
        return super().model().float()

    def build(self, module: nn.Module) -> Any:
        module = _Own(module)
        module.optimizer = torch.optim.SGD(module.parameters(), lr=self.options.rates[0])
        return module

    def run_backward(self, loss: Tensor, retain: bool) -> None:
        (loss / self.options.micro_steps).backward(retain_graph=retain)
        self.came, self.failed = self.modules, False

    def plain_backward(self, loss: Tensor) -> None:
        self.run_backward(loss, False)

    def unrelated(self) -> None:
        """In a chain it is the other engine's."""
        came = self.came
        super().unrelated()
        if self.critic is not None:
            self.came = [*came, self.critic.module]

    def boomed(self) -> None:
        """A backward has raised, over a forward of the engine of now: no other got a gradient."""
        self.failed = True
        known = TELLS_OF_GRADIENTS and self.options.stage > bool(self.options.sums)
        self._drop(got := [self.now.module] if known else self.modules)
        self.came = [*self.came, *got]

    def _drop(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            module.zero_grad()

    def _zero(self, modules: Sequence[nn.Module]) -> None:
        self._drop(modules)
        self.zeroed |= {param for module in modules for param in module.parameters()}

    def zero_grad(self) -> None:
        """Where a micro step has just been counted, stages 2 and 3 mean to go on."""
        self._zero(self.came if self.options.stage > 1 or self.options.sums else self.modules)

    def optimizer_zero_grad(self) -> None:
        """Stage 1 drops its fp32 sums, too, as PyTorch does."""
        self._zero(self.came if self.options.stage > 1 else self.modules)

    def take_step(self, engine: Any, whole: bool) -> None:
        self.came = ()
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
        self.zeroed = set()
        try:
            yield
        finally:
            if drops:
                for param, grad in zip(params, before, strict=True):
                    param.grad = None if param in self.zeroed else grad

    def patch(self, *_: str) -> None:
        """Nothing, and so do others that are of engines alone."""

    destroy = fails = save = patch


class _Own(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        return self.module(x, **how)
