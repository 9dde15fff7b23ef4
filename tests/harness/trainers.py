"""Whom a script asks: a DeepSpeed engine, or plain PyTorch, by the same names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_patches.core.calls import meanwhile
from tests.harness import leftovers, models
from tests.harness.groups import grid
from tests.harness.leftovers import gathered
from tests.harness.options import Options
from tests.harness.surroundings import Parameters, build_engine, build_optimizer, parameters


class Trainer:
    """Base of the engine's and plain PyTorch's trainer."""

    is_engine: bool
    module: nn.Module
    folder: Path  # of this script's run, common to all ranks

    def __init__(self, options: Options) -> None:
        self.options, self.count = options, options.steps
        self.around_step: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()

    def steps(self) -> Iterator[int]:
        """The steps of a training, which is looked at between them."""
        for step in range(self.count):
            with self.around_step(step):
                yield step

    def train(self, script: Callable[..., None], **arguments: Any) -> None:
        """Run all of a script, or what it does in each step or `micro` step, and take that."""
        wants = signature(script).parameters
        if "step" not in wants:
            script(self, **arguments)
            return
        for step in self.steps():
            for micro in range(self.options.micro_steps) if "micro" in wants else [None]:
                script(self, step, *[micro] * ("micro" in wants), **arguments)
                self.step()


class PlainTrainer(Trainer):
    """Data parallel training: gradients add up, and are averaged at the step.

    forwards: as many as of its module so far, and of those of others that it made.
    """

    is_engine = False

    def __init__(self, module: nn.Module, options: Options) -> None:
        super().__init__(options)
        self.module, self._start = module, deepcopy(module)
        self._optimizer = build_optimizer(module, replace(options, fused=False))
        self._micro_step, self._micro_steps = 0, options.micro_steps
        self.group = grid().data if options.grid else None
        self.forwards: list[None] = []
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if "torch_autocast" in options.settings:  # a loop may make large what it rounds
            device = next(module.parameters()).device.type
            self._autocast = partial(torch.autocast, device, torch.bfloat16)
        module.register_forward_pre_hook(lambda *_: self.forwards.append(None))

    def __call__(self, *inputs: Tensor, **named: Any) -> Any:
        with self._autocast():
            return self.module(*inputs, **named)

    def around_the_engine(self, *inputs: Tensor, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss / self._micro_steps).backward(retain_graph=retain_graph)

    def resize(self, micro_steps: int) -> None:
        """Steps are of so many micro steps from here on."""
        self._micro_step, self._micro_steps = 0, micro_steps

    def unscaled_backward(self, loss: Tensor) -> None:
        loss.backward()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    zero_optimizer_grad = zero_grad

    def step(self) -> None:
        self._micro_step += 1
        if self._micro_step % self._micro_steps:
            return
        grads = self.full_grads()
        if clip := self.options.clip:
            norm = torch.stack([grad.norm() for grad in grads]).norm().item()
            grads = [grad * min(1.0, clip / (norm + 1e-6)) for grad in grads]
        for param, grad in zip(self._trained(), grads, strict=True):
            param.grad = grad
        self._optimizer.step()
        self.module.zero_grad()

    def full_grads(self) -> list[Tensor]:
        """Averaged over the ranks, all at once; a rank without a gradient gives zeros."""
        params = self._trained()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size(self.group)
        split = flat.split([param.numel() for param in params])
        return [part.view_as(param) for part, param in zip(split, params, strict=True)]

    def _trained(self) -> list[nn.Parameter]:
        params = self.module.parameters()
        return [param for param in params if param.requires_grad or param.grad is not None]

    def window(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    no_sync = gathered = window

    def another(self) -> PlainTrainer:
        other = PlainTrainer(deepcopy(self._start), self.options)
        other.forwards = self.forwards
        return other

    def offload(self, *_: Any) -> None:
        """Nothing, and so do others of an engine's."""

    save = load = boundary = offload

    def change_grads(self, change: Callable[[Tensor], Tensor]) -> None:
        for param, grad in zip(self._trained(), self.full_grads(), strict=True):
            param.grad = change(grad)

    def give(self, params: Iterable[nn.Parameter], value: float) -> None:
        """Gradients that are this value everywhere, on all ranks."""
        for param in params:
            param.grad = torch.full_like(param, value)

    def parameters(self) -> Parameters:
        return {name: p.detach().float().clone() for name, p in self.module.named_parameters()}


class EngineTrainer(Trainer):
    """A DeepSpeed engine, driven in one of the three styles of calling backward.

    strict: after each step nothing may be left behind that was not there when it was made.
    left, available: see `gathered`; after each backward.
    """

    is_engine = True

    def __init__(
        self,
        engine: Any,
        options: Options | None = None,
        make: Callable[[], Any] | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(options or Options())
        self.engine, self.style = engine, self.options.style
        self._make, self._strict = make, strict
        self.left, self.available = [], []
        self._held: list[nn.Parameter] = []  # by the script itself, at present
        if strict:
            self.note()

    def note(self) -> None:
        """Take the hooks and attributes that are there now for those that may stay."""
        self._before = leftovers.of(self.engine)

    def leaves_nothing(self) -> None:
        """Raises AssertionError for what is left behind, after a step, a window or a failure."""
        left = leftovers.since(self._before, self.engine)
        assert not left, left

    @property
    def module(self) -> Any:
        return self.engine.module

    def __call__(self, *inputs: Tensor, **named: Any) -> Any:
        return self.engine(*inputs, **named)

    def around_the_engine(self, *inputs: Tensor) -> Any:
        """A forward that the engine does not see."""
        return self.engine.module(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        if self.style == "engine":
            self.engine.backward(loss, retain_graph=retain_graph)
        elif self.style == "scale":
            self.engine.scale(loss).backward(retain_graph=retain_graph)
        else:
            loss.backward(retain_graph=retain_graph)
        self.left.append(gathered(self.engine, held=self._held))
        self.available.append(gathered(self.engine, entitled=False, held=self._held))

    def unscaled_backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def resize(self, micro_steps: int) -> None:
        of_one = self.engine.train_batch_size() // self.engine.gradient_accumulation_steps()
        self.engine.set_train_batch_size(micro_steps * of_one)

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def zero_optimizer_grad(self) -> None:
        self.engine.optimizer.zero_grad()

    def step(self) -> None:
        before = self.engine.global_steps
        self.engine.step()
        if self._strict and self.engine.global_steps > before:  # or gradients wait
            self.leaves_nothing()

    def no_sync(self) -> Any:
        return self.engine.no_sync()

    def window(self) -> Any:
        return self.engine.coalesce_grad_reduction()

    def boundary(self, is_boundary: bool | None) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        from deepspeed.runtime.zero import GatheredParameters

        params = list(params)
        gathering = GatheredParameters(params, enabled=any(hasattr(p, "ds_id") for p in params))
        with gathering, meanwhile(self, _held=[*self._held, *params]):
            yield

    def another(self) -> EngineTrainer:
        return type(self)(self._make(), self.options, self._make, self._strict)

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

    def give(self, params: Iterable[nn.Parameter], value: float) -> None:
        from deepspeed.utils import safe_set_full_grad

        failed: Exception | None = None
        for param in params:
            shape = getattr(param, "ds_shape", param.shape)
            try:
                safe_set_full_grad(param, torch.full(shape, value, device=param.device))
            except Exception as error:  # of a rank that has a part of it, and the others go on
                failed = error
        count = torch.tensor(float(failed is not None), device=self.engine.device)
        dist.all_reduce(count)
        if count:
            raise failed or RuntimeError("another rank could not give its gradient")

    def change_grads(self, change: Callable[[Tensor], Tensor]) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        for param in self.module.parameters():
            if param.requires_grad:
                safe_set_full_grad(param, change(safe_get_full_grad(param)))

    def parameters(self) -> Parameters:
        return parameters(self.module)


def engine_trainer(
    model: str | nn.Module = "TwoHeads", folder: Path = Path(), **options: Any
) -> EngineTrainer:
    """An engine of these :class:`Options` that trains a model, of this name or this one."""
    wanted = Options(**options)
    start = models.build(model, wanted.torch_dtype) if isinstance(model, str) else model
    trainer = EngineTrainer(build_engine(start, wanted.config, options=wanted), wanted)
    trainer.folder = folder
    return trainer


def engine_of(model: str | nn.Module = "TwoHeads", **options: Any) -> Any:
    return engine_trainer(model, **options).engine


def worst_difference(ends: Parameters, expected: Parameters) -> tuple[float, str]:
    """Largest difference over all parameters, relative to each parameter's update scale of 1.

    Where one is NaN or infinite, it is infinite: `max` would pass over a NaN.
    """
    assert ends.keys() == expected.keys()
    largest = {
        name: (ends[name].float() - expected[name].float()).abs().max().item()
        for name in ends
        if ends[name].numel()
    }
    return max((gap if math.isfinite(gap) else math.inf, name) for name, gap in largest.items())
