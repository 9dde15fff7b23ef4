"""Run one script by a DeepSpeed engine and by plain PyTorch, and say how far apart they end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ds_patches
from tests.zero3_retain import models, trainers

#: Three-step training in float32 ends within a few rounding steps of a parameter of size 1.
EXACT = 1e-6


@dataclass
class Outcome:
    """What became of an engine, held against plain PyTorch from the same start."""

    difference: float = float("inf")  # largest, over all parameters
    where: str = ""
    moved: float = 0.0  # how far the reference itself went
    available: list[list[str]] = field(default_factory=list)  # after each backward
    error: str = ""

    @property
    def equal(self) -> bool:
        return not self.error and self.moved > 1e-3 and self.difference <= EXACT


@contextmanager
def applied(patch: str, **options: str) -> Iterator[None]:
    """A patch applied for the length of a block, and really live in it."""
    ds_patches.apply(patch, **options)
    assert ds_patches.is_applied(patch)
    try:
        yield
    finally:
        ds_patches.unapply(patch)


patched = partial(applied, "zero3_retain")


def several_losses(outputs: Any, classes: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Up to four losses over two heads; the first two reach one head each."""
    first, second = models.losses(outputs, classes)
    return [first, second, first * second, 0.1 * (first - second) ** 2][:count]


def one_forward_several_backwards(
    trainer: Any, *, backwards: int, zero: bool = False, steps: int = 3, micro_steps: int = 1
) -> None:
    """`zero`: call ``zero_grad()`` before every backward but the first."""
    for step in range(steps):
        for micro in range(micro_steps):
            tokens, classes = models.batch(step, micro)
            outputs = trainer.forward(tokens)
            for index, loss in enumerate(several_losses(outputs, classes, backwards)):
                if zero and index:
                    trainer.zero_grad()
                trainer.backward(loss, retain_graph=index < backwards - 1)
            trainer.step()


@contextmanager
def half_precision_allowed() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on a CPU that computes it slowly; its own check says no."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def train(
    model: str = "TwoHeads",
    *,
    stage: int = 3,
    style: str = "engine",
    backwards: int = 2,
    zero: bool = False,
    steps: int = 3,
    micro_steps: int = 1,
    dtype: str = "float32",
    patch: bool = True,
    settings: dict[str, Any] | None = None,
) -> Outcome:
    """Several backwards over one forward, by an engine and by PyTorch. Runs on every rank."""
    script = partial(
        one_forward_several_backwards,
        backwards=backwards,
        zero=zero,
        steps=steps,
        micro_steps=micro_steps,
    )
    start = models.build(getattr(models, model), getattr(torch, dtype))
    return run(script, start, stage, style, micro_steps, patch, settings or {})


def run(
    script: trainers.Script,
    start: torch.nn.Module,
    stage: int,
    style: str = "engine",
    micro_steps: int = 1,
    patch: bool = True,
    settings: dict[str, Any] | None = None,
) -> Outcome:
    """Any script, by an engine and by PyTorch; an exception of the engine's is an outcome."""
    expected = trainers.plain(start, script, micro_steps)
    origin = {name: p.detach().clone() for name, p in start.named_parameters()}
    with patched() if patch else nullcontext():
        wanted = trainers.config(stage, micro_steps=micro_steps, **(settings or {}))
        trainer = trainers.EngineTrainer(trainers.build_engine(start, wanted), style)
        outcome = Outcome(available=trainer.available_after_backward)
        trainers.run_into(outcome, script, trainer, expected, origin)
        return outcome
