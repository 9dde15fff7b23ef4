"""Steps of real engines inside a train check, on every rank, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ds_patches
from tests.listening import listening
from tests.training import models
from tests.training.options import Options
from tests.training.surroundings import build_engine, half_precision_allowed


@dataclass
class Outcome:
    """What a check said on one rank."""

    untrained: dict[str, str] = field(default_factory=dict)  # names and notes
    idle: dict[str, str] = field(default_factory=dict)
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0


class UnusedBranch(models.TwoHeads):
    """A layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(models.WIDTH, models.WIDTH)


class CutOff(models.TwoHeads):
    """A layer that runs, and whose output goes on without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(models.WIDTH, models.WIDTH)

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        return self.cut(x).detach()


class ZeroedByAHook(CutOff):
    """A layer whose gradient arrives, and is zero in every element."""

    def branch(self, x: Tensor) -> Tensor:
        y: Tensor = self.cut(x)
        y.register_hook(torch.zeros_like)
        return y


class CutOffOnOneRank(CutOff):
    """The layer trains on the last rank only."""

    def branch(self, x: Tensor) -> Tensor:
        return self.cut(x) * dist.get_rank()


class RunsOnOneRank(CutOff):
    """A branch that rank 0 runs and the others do not, cut off from the loss."""

    def branch(self, x: Tensor) -> Tensor:
        return self.cut(x).detach() if dist.get_rank() == 0 else torch.zeros_like(x)


class OnAndOff(CutOff):
    """The layer trains while `on`; then it runs, cut off."""

    on = True

    def branch(self, x: Tensor) -> Tensor:
        return self.cut(x) if self.on else self.cut(x).detach()


class Frozen(CutOff):
    """What is cut off does not want to train."""

    def __init__(self) -> None:
        super().__init__()
        self.cut.requires_grad_(False)


class NeverCalled(CutOff):
    """A layer whose parameters are used, and which is not called."""

    def branch(self, x: Tensor) -> Tensor:
        return F.linear(x, self.cut.weight, self.cut.bias)


class HeldByAList(models.TwoHeads):
    """Parameters in a container without a forward; the second one is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(models.WIDTH), torch.ones(models.WIDTH)])

    def trunk(self, tokens: Tensor) -> Tensor:
        return super().trunk(tokens) * self.scales[0] + 0 * self.scales[1]


def model_of(name: str) -> Any:
    """One of these, or the name of one that others train."""
    return globals().get(name, name)


def engine_of(model: str | type[nn.Module], stage: int, **options: Any) -> Any:
    given = Options(stage, **options)
    kind = model_of(model) if isinstance(model, str) else model
    return build_engine(models.build(kind, given.torch_dtype), given.config)


def step(engine: Any, index: int = 0, *, micro_steps: int = 1) -> None:
    """A gradient accumulation and its step."""
    for micro in range(micro_steps):
        engine.backward(models.loss_of(engine, index, micro))
        engine.step()


def outcome_of(engine: Any, block: Callable[[], None], action: str = "raise") -> Outcome:
    outcome, report = Outcome(), ds_patches.TrainReport()
    with listening() as outcome.warnings:
        try:
            with ds_patches.train_check(engine, action=action) as report:
                block()
        except ds_patches.DsPatchesError as error:
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.untrained = {one.name: one.note for one in report.untrained}
    outcome.idle = {one.name: one.note for one in report.idle}
    outcome.steps, outcome.skipped = report.steps, report.skipped
    return outcome


def check(
    model: str,
    stage: int,
    *,
    steps: int = 1,
    micro_steps: int = 1,
    action: str = "raise",
    patches: bool = False,
    **options: Any,
) -> Outcome:
    """One step before the check and `steps` in it."""
    if patches:
        ds_patches.apply_all()
    try:
        with half_precision_allowed():
            engine = engine_of(model, stage, micro_steps=micro_steps, **options)
            step(engine, micro_steps=micro_steps)
            return outcome_of(
                engine,
                lambda: [step(engine, 1 + i, micro_steps=micro_steps) for i in range(steps)],
                action,
            )
    finally:
        if patches:
            ds_patches.unapply_all()


def lose(engine: Any) -> None:
    """Take the hooks away that reduce gradients at stage 3, as DeepCompile does."""
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    zero_grad = engine.optimizer.zero_grad

    def clear(*args: Any, **kwargs: Any) -> None:
        for param in engine.module.parameters():
            param.grad = None  # stock notes streams on it first, which a CPU has not
        zero_grad(*args, **kwargs)

    engine.optimizer.zero_grad = clear


def after_losing(model: str, steps_before: int) -> Outcome:
    engine = engine_of(model, 3)
    for index in range(steps_before):
        step(engine, index)
    lose(engine)
    return outcome_of(engine, lambda: step(engine, 9))
