"""Steps of real engines inside a train check, on every rank, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ds_patches
from tests.harness import models, trainers
from tests.harness.options import Options
from tests.listening import listening


@dataclass
class Verdict:
    """What a check said on one rank."""

    untrained: dict[str, str] = field(default_factory=dict)  # names and notes
    idle: dict[str, str] = field(default_factory=dict)
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0


def replaced(by: Callable[[Tensor], Tensor], cut: nn.Module, x: Tensor) -> Tensor:
    """Call a layer whose output's gradient is replaced."""
    y: Tensor = cut(x)
    y.register_hook(by)
    return y


#: What becomes of a layer and what goes into it, by name.
BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "trains": lambda cut, x: cut(x),
    "frozen": lambda cut, x: cut(x).detach(),
    "never called": lambda cut, x: F.linear(x, cut.weight, cut.bias),
    "unused": lambda cut, x: torch.zeros_like(x),
    "cut off": lambda cut, x: cut(x).detach(),
    "zeroed": partial(replaced, torch.zeros_like),  # it arrives, and is zero in every element
    "constant": partial(replaced, torch.ones_like),  # so is the bias's, in every step
    "trains on one rank": lambda cut, x: cut(x) * dist.get_rank(),
    "runs on one rank": lambda cut, x: torch.zeros_like(x) if dist.get_rank() else cut(x).detach(),
}


class Branched(models.TwoHeads):
    """With a branch, which may be cut off from the loss."""

    def __init__(self, how: str = "cut off") -> None:
        super().__init__()
        self.cut, self.how = nn.Linear(models.WIDTH, models.WIDTH), how
        self.cut.requires_grad_(how != "frozen")

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        return BRANCHES[self.how](self.cut, x)


class HeldByAList(models.TwoHeads):
    """Parameters in a container without a forward; the second one is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(models.WIDTH), torch.ones(models.WIDTH)])

    def trunk(self, tokens: Tensor) -> Tensor:
        return super().trunk(tokens) * self.scales[0] + 0 * self.scales[1]


class LowRank(models.TwoHeads):
    """As LoRA begins: the second matrix is zero, and so is the first one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, 2, bias=False)
        self.second = nn.Linear(2, models.WIDTH, bias=False)
        nn.init.zeros_(self.second.weight)

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)
        return x + self.second(self.first(x))


def model_of(name: str) -> Any:
    """One with this branch, one of these, or the name of one that others train."""
    return partial(Branched, name) if name in BRANCHES else globals().get(name, name)


def engine_of(model: str, stage: int, **options: Any) -> Any:
    dtype = Options(**options).torch_dtype
    return trainers.engine_of(models.build(model_of(model), dtype), stage=stage, **options)


def step(engine: Any, index: int = 0, *, micro_steps: int = 1, **more: Any) -> None:
    """A gradient accumulation and its step."""
    for micro in range(micro_steps):
        engine.backward(models.loss_of(engine, index, micro, **more))
        engine.step()


def verdict_of(engine: Any, block: Callable[[], object], action: str = "raise") -> Verdict:
    report, said = ds_patches.TrainReport(), ""
    with listening() as warnings:
        try:
            with ds_patches.train_check(engine, action=action) as report:
                block()
        except ds_patches.DsPatchesError as error:
            said = f"{type(error).__name__}: {error}"
    untrained, idle = ({one.name: one.note for one in s} for s in (report.untrained, report.idle))
    return Verdict(untrained, idle, said, warnings, report.steps, report.skipped)


def check(
    model: str,
    stage: int,
    *,
    before: int = 1,
    change: Callable[[Any], object] = lambda engine: None,
    steps: int = 1,
    micro_steps: int = 1,
    action: str = "raise",
    patches: bool = False,
    block: Callable[[Any], object] | None = None,
    **options: Any,
) -> Verdict:
    """Some steps before the check and some in it, or a block. change: the engine, between them."""
    if patches:
        ds_patches.apply_all()
    try:
        engine = engine_of(model, stage, micro_steps=micro_steps, **options)

        def train(*indices: int) -> None:
            for index in indices:
                step(engine, index, micro_steps=micro_steps)

        train(*range(before))
        change(engine)
        if block:
            return verdict_of(engine, lambda: block(engine), action)
        return verdict_of(engine, lambda: train(*range(before, before + steps)), action)
    finally:
        ds_patches.unapply_all()
