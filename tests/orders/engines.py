"""DeepSpeed's engines go through an order."""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import ds_patches
from tests.harness.surroundings import build_engine
from tests.orders.sides import Side
from tests.orders.words import Order


def live() -> list[str]:
    return [name for name in ds_patches.names() if ds_patches.is_applied(name)]


class Engines(Side):
    """patched: by whom; stock's leaves patching out."""

    def __init__(self, order: Order, patched: bool) -> None:
        self.patches, self.all = patched, live() if patched else []
        super().__init__(order)
        self.patched = self.patched_since = patched
        self.kept: list[Exception] = []  # and so what their tracebacks hold

    @property
    def dtype(self) -> torch.dtype:
        return self.options.torch_dtype

    def build(self, module: nn.Module) -> Any:
        return build_engine(module, self.options.config, options=self.options)

    def run_backward(self, loss: Tensor, retain: bool) -> None:
        (self.critic or self.now).backward(loss, retain_graph=retain)

    def plain_backward(self, loss: Tensor) -> None:
        loss.backward()

    def boomed(self) -> None:
        """The engine drops by itself."""

    def zero_grad(self) -> None:
        for engine in filter(None, (self.now, self.critic)):
            engine.zero_grad()

    def optimizer_zero_grad(self) -> None:
        if self.options.stage == 3 and self.open:
            # On a CPU, DeepSpeed's raises where parameters hold gradients: it records their stream.
            return self.zero_grad()
        for engine in filter(None, (self.now, self.critic)):
            engine.optimizer.zero_grad()
        return None

    def take_step(self, engine: Any, whole: bool) -> None:
        engine.step()

    def window(self, drops: bool = False) -> Any:
        return self.now.coalesce_grad_reduction()

    def patch(self, function: str, *name: str) -> None:
        if self.patches:
            getattr(ds_patches, function)(*name)
            self.patched = live() == self.all
            self.patched_since &= self.patched

    def destroy(self) -> None:
        for engine in self.engines:
            if engine is not self.now:
                engine.destroy()
        self.engines = [self.now]

    def save(self) -> None:
        with TemporaryDirectory() as folder:
            self.now.save_checkpoint(folder)

    def fails(self) -> None:
        if not self.between_steps:
            return
        try:
            build_engine(self.model(), self.options.config, optimizer="none", options=self.options)
        except Exception as error:
            self.kept.append(error)
