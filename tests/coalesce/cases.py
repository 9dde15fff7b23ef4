"""Run one script by a DeepSpeed engine with windows and by plain PyTorch, and compare the ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ds_patches
from tests.listening import listening
from tests.zero3_retain import models, trainers
from tests.zero3_retain.cases import half_precision_allowed

#: Three-step training in float32 ends within a few rounding steps of a parameter of size 1.
EXACT = 1e-6
#: A parameter of size 2 in that dtype, one rounding step off.
ROUNDING = {"float32": EXACT, "bfloat16": 2**-6, "float16": 2**-9}


class PlainTrainer(trainers.PlainTrainer):
    """Plain PyTorch adds up whatever comes between two steps; a window changes nothing."""

    def window(self, **_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        """As data parallel training does, let a rank without a gradient give zeros."""
        for param in self.model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        super().step()


class EngineTrainer(trainers.EngineTrainer):
    def window(self, **arguments: Any) -> AbstractContextManager[None]:
        window: AbstractContextManager[None] = self.engine.coalesce_grad_reduction(**arguments)
        return window


class BoundaryTrainer(trainers.EngineTrainer):
    """Stock's own way to several backwards per step: all but the last are no boundary."""

    @contextmanager
    def window(self, **_: Any) -> Iterator[None]:
        self._left = BACKWARDS
        yield

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._left -= 1
        self.engine.set_gradient_accumulation_boundary(self._left == 0)
        super().backward(loss, retain_graph)


class BothWaysTrainer(BoundaryTrainer):
    """Sets boundaries in a window too: they change nothing there, and the last one holds after."""

    @contextmanager
    def window(self, **arguments: Any) -> Iterator[None]:
        with super().window(), self.engine.coalesce_grad_reduction(**arguments):
            yield
        assert self.engine._is_gradient_accumulation_boundary is True


BACKWARDS = 3
Script = Callable[[Any], None]


@dataclass
class Outcome:
    """What became of an engine, held against plain PyTorch from the same start."""

    difference: float = float("inf")  # largest, over all parameters
    where: str = ""
    moved: float = 0.0  # how far the reference itself went
    error: str = ""
    heard: list[str] = field(default_factory=list)  # what the patches logged

    def equal(self, dtype: str = "float32") -> bool:
        tolerance = ROUNDING[dtype]
        return (
            not self.error
            and self.moved > max(1e-3, 4 * tolerance)
            and (self.difference <= tolerance)
        )


@contextmanager
def patched(*others: str, **options: str) -> Iterator[None]:
    """coalesce applied for the length of a block, and really live in it; `others` with it."""
    for name in others:
        ds_patches.apply(name)
    ds_patches.apply("coalesce", **options)
    assert all(map(ds_patches.is_applied, ("coalesce", *others)))
    try:
        yield
    finally:
        ds_patches.unapply_all()


def several_backwards(
    trainer: Any, *, backwards: int = BACKWARDS, steps: int = 3, **arguments: Any
) -> None:
    """Each step is one window of `backwards` forwards and backwards, over other batches."""
    for step in range(steps):
        with trainer.window(**arguments):
            for index in range(backwards):
                tokens, classes = models.batch(step, index)
                trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        trainer.step()


def plain(
    start: torch.nn.Module,
    script: Script,
    micro_steps: int = 1,
    reference: type[PlainTrainer] = PlainTrainer,
) -> trainers.Parameters:
    trainer = reference(deepcopy(start), micro_steps)
    script(trainer)
    return trainer.parameters()


def run(
    script: Script,
    start: torch.nn.Module,
    stage: int,
    *,
    style: str = "engine",
    settings: dict[str, Any] | None = None,
    patch: bool = True,
    trainer_class: type[trainers.EngineTrainer] = EngineTrainer,
    reference: type[PlainTrainer] = PlainTrainer,
    others: tuple[str, ...] = (),
    micro_steps: int = 1,
    **options: str,
) -> Outcome:
    """Any script, by an engine and by PyTorch; an exception of the engine's is an outcome."""
    expected = plain(start, script, micro_steps, reference)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    with patched(*others, **options) if patch else nullcontext(), listening() as heard:
        wanted = trainers.config(stage, micro_steps=micro_steps, **(settings or {}))
        trainer = trainer_class(trainers.build_engine(start, wanted), style)
        outcome = Outcome(heard=heard)
        trainers.run_into(outcome, script, trainer, expected, origin)
        return outcome


def train(
    model: str = "TwoHeads",
    *,
    stage: int,
    style: str = "engine",
    dtype: str = "float32",
    settings: dict[str, Any] | None = None,
    others: tuple[str, ...] = (),
    options: dict[str, str] | None = None,
    **script: Any,
) -> Outcome:
    """`several_backwards` on a model of tests.zero3_retain.models. Runs on every rank."""
    start = models.build(globals().get(model) or getattr(models, model), getattr(torch, dtype))
    with half_precision_allowed() if dtype == "float16" else nullcontext():
        return run(
            partial(several_backwards, **script),
            start,
            stage,
            style=style,
            settings=settings,
            others=others,
            **(options or {}),
        )


class Either(torch.nn.Module):
    """Scales by one of two parameters, or by both: gathered alike on all ranks, used otherwise."""

    used = slice(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(models.WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in list(self.scales)[Either.used]:
            x = x * scale
        return x


class Uneven(models.TwoHeads):
    """A rank may leave one of two parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Either())


# --- Cases with a script of their own; each runs on every rank -----------------------------------


def norm_of_a_window(stage: int, clip: float, settings: dict[str, Any]) -> tuple[float, float]:
    """The gradient norm that clipping goes by, and PyTorch's of the same sum."""
    start = models.build(models.TwoHeads)
    reference = PlainTrainer(deepcopy(start))
    for index in range(BACKWARDS):
        tokens, classes = models.batch(0, index)
        sum(models.losses(reference.forward(tokens), classes)).backward()
    gradients = [param.grad for param in reference.model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    expected = torch.stack([g.norm() for g in gradients]).norm() / dist.get_world_size()
    with patched():
        wanted = trainers.config(stage, gradient_clipping=clip, **settings)
        trainer = EngineTrainer(trainers.build_engine(start, wanted))
        several_backwards(trainer, steps=1)
        return float(trainer.engine.get_global_grad_norm()), float(expected)


def _divided_by_two(trainer: Any) -> None:
    for step in range(3):
        if isinstance(trainer, EngineTrainer):
            trainer.engine.set_gradient_accumulation_boundary(True)
        with trainer.window():
            for index in range(BACKWARDS):
                tokens, classes = models.batch(step, index)
                trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
        for _ in range(1 if isinstance(trainer, EngineTrainer) else 2):
            trainer.step()


def with_micro_steps(stage: int) -> Outcome:
    """gradient_accumulation_steps=2: the loss is halved, inside a window too."""
    return run(_divided_by_two, models.build(models.TwoHeads), stage, micro_steps=2)


def _resting_heads(trainer: Any) -> None:
    rank = dist.get_rank()
    for step in range(4):
        Either.used = [slice(0, 2), slice(0, 1), slice(rank, rank + 1), slice(0, 2)][step]
        with trainer.window():
            for index in range(2):
                tokens, classes = models.batch(step, index)
                losses = models.losses(trainer.forward(tokens), classes)
                trainer.backward(sum(losses[:1] if step == 1 else losses))
        trainer.step()


def with_resting_heads(stage: int, settings: dict[str, Any], flush: str) -> Outcome:
    start = models.build(Uneven)
    return run(_resting_heads, start, stage, settings=settings, flush=flush)


def stock_with_boundaries(stage: int) -> Outcome:
    """No window and no patch: the baseline that a window is to equal."""
    start = models.build(models.TwoHeads)
    return run(several_backwards, start, stage, patch=False, trainer_class=BoundaryTrainer)


def with_boundaries_inside(stage: int) -> Outcome:
    start = models.build(models.TwoHeads)
    return run(several_backwards, start, stage, trainer_class=BothWaysTrainer)


def _backwards_over_one_forward(trainer: Any) -> None:
    for step in range(3):
        with trainer.window():
            for index in range(2):
                tokens, classes = models.batch(step, index)
                first, second = models.losses(trainer.forward(tokens), classes)
                trainer.backward(first, retain_graph=True)
                trainer.backward(second)
        trainer.step()


def with_zero3_retain(stage: int, style: str) -> Outcome:
    start = models.build(models.TwoHeads)
    script = _backwards_over_one_forward
    return run(script, start, stage, style=style, others=("zero3_retain",))
