"""Whom a script asks: a DeepSpeed engine, or plain PyTorch, by the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.scripts.groups import grid
from tests.scripts.surroundings import build_optimizer
from tests.zero3_retain import trainers

STEPS = 5
Parameters = trainers.Parameters


class Trainer:
    """What both have in common."""

    module: nn.Module
    folder: Path  # of this script's run, common to all ranks
    around_step: Callable[[int], AbstractContextManager[None]]

    def __init__(self) -> None:
        self.count = STEPS
        self.around_step = lambda step: nullcontext()

    def steps(self) -> Iterator[int]:
        """The steps of a training, which is looked at between them."""
        for step in range(self.count):
            with self.around_step(step):
                yield step


class PlainTrainer(Trainer):
    """Data parallel SGD: gradients add up, and are averaged at the step."""

    is_engine = False

    def __init__(
        self, module: nn.Module, micro_steps: int = 1, clip: float = 0.0, muon: bool = False
    ) -> None:
        super().__init__()
        self.module, self._micro_steps, self._clip, self._muon = module, micro_steps, clip, muon
        self._optimizer = build_optimizer(module, muon)
        self._start = deepcopy(module)
        self._micro_step = 0
        self._group = g.get_data_parallel_group() if (g := grid()) else None

    def __call__(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss / self._micro_steps).backward(retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.module.zero_grad()

    zero_optimizer_grad = zero_grad

    def step(self) -> None:
        self._micro_step += 1
        if self._micro_step % self._micro_steps == 0:
            self.update()

    def update(self) -> None:
        grads = self.averaged()
        if self._clip:
            norm = torch.stack([grad.norm() for grad in grads]).norm().item()
            grads = [grad * min(1.0, self._clip / (norm + 1e-6)) for grad in grads]
        for param, grad in zip(self._trained(), grads, strict=True):
            param.grad = grad
        self._optimizer.step()
        self.module.zero_grad()

    def averaged(self) -> list[Tensor]:
        """Over the ranks, all at once; a rank without a gradient gives zeros."""
        params = self._trained()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        split = flat.split([param.numel() for param in params])
        return [part.view_as(param) for part, param in zip(split, params, strict=True)]

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def window(self) -> AbstractContextManager[None]:
        return nullcontext()

    def boundary(self, at: bool | None) -> None:
        pass

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def another(self) -> PlainTrainer:
        return PlainTrainer(deepcopy(self._start), self._micro_steps, self._clip, self._muon)

    def save(self) -> None:
        pass

    def load(self) -> None:
        pass

    def offload(self) -> None:
        pass

    def full_grads(self) -> list[Tensor]:
        return self.averaged()

    def change_grads(self, change: Callable[[Tensor], Tensor]) -> None:
        for param, grad in zip(self._trained(), self.averaged(), strict=True):
            param.grad = change(grad)

    def parameters(self) -> Parameters:
        return {name: p.detach().float().clone() for name, p in self.module.named_parameters()}


class EngineTrainer(Trainer):
    """A DeepSpeed engine; notes what is gathered after each backward."""

    is_engine = True

    def __init__(self, engine: Any, make: Callable[[], Any]) -> None:
        super().__init__()
        self.engine, self._make = engine, make
        self.left: list[list[str]] = []

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        return self.engine.module

    def __call__(self, *inputs: Tensor) -> Any:
        return self.engine(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.engine.backward(loss, retain_graph=retain_graph)
        self.left.append(gathered(self.engine))

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def zero_optimizer_grad(self) -> None:
        self.engine.optimizer.zero_grad()

    def step(self) -> None:
        self.engine.step()

    def no_sync(self) -> AbstractContextManager[None]:
        block: AbstractContextManager[None] = self.engine.no_sync()
        return block

    def window(self) -> AbstractContextManager[None]:
        block: AbstractContextManager[None] = self.engine.coalesce_grad_reduction()
        return block

    def boundary(self, at: bool | None) -> None:
        self.engine.set_gradient_accumulation_boundary(at)

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        from deepspeed.runtime.zero import GatheredParameters

        params = list(params)
        partitioned = any(hasattr(param, "ds_id") for param in params)
        block: AbstractContextManager[None] = GatheredParameters(params, enabled=partitioned)
        return block

    def another(self) -> EngineTrainer:
        return EngineTrainer(self._make(), self._make)

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder), tag="here")

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder), tag="here")

    def offload(self) -> None:
        """All states away and back, between two steps."""
        self.engine.offload_states()
        self.engine.reload_states()

    def full_grads(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return [safe_get_full_grad(p) for p in self.module.parameters() if p.requires_grad]

    def change_grads(self, change: Callable[[Tensor], Tensor]) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        for param in self.module.parameters():
            if param.requires_grad:
                safe_set_full_grad(param, change(safe_get_full_grad(param)))

    def parameters(self) -> Parameters:
        found = {}
        for name, param in self.module.named_parameters():
            with self.gathered([param]):
                found[name] = param.detach().float().clone()
        return found


def gathered(engine: Any) -> list[str]:
    """Names of parameters that are whole, or on their way to be, and need not stay so."""
    return [
        name
        for name, param in engine.module.named_parameters()
        if hasattr(param, "ds_id")
        and param.ds_status.name != "NOT_AVAILABLE"
        and not param.ds_persist
    ]
