"""bf16 without ZeRO: the master weights move as plain PyTorch's do."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import models
from tests.training.models import batch, losses
from tests.training.options import Options
from tests.training.run import applied
from tests.training.stock import RELEASE, Version
from tests.training.surroundings import RATE, build_engine, half_precision_allowed
from tests.training.trainers import worst_difference
from tests.world import World

#: DeepSpeed takes its fp16 optimizer for bf16 there, whose loss scale it does not need.
WRONG = Version("0.17.6") <= RELEASE <= Version("0.18.5")
OPTIONS = Options(stage=0, dtype="bfloat16", steps=4)


@dataclass
class Outcome:
    error: str = ""
    difference: float = float("inf")
    moved: float = 0.0
    said: int = 0

    @property
    def equal(self) -> bool:
        return (
            not self.error
            and self.moved > 2 * OPTIONS.tolerance
            and self.difference <= OPTIONS.tolerance
        )


def plainly(model: nn.Module, options: Options) -> dict[str, torch.Tensor]:
    """bf16 gradients, a float32 copy of the weights that the optimizer steps."""
    params = [*model.parameters()]
    masters = [p.detach().float().clone() for p in params]
    optimizer = torch.optim.SGD(masters, lr=RATE)
    for step in range(options.steps):
        for micro in range(options.micro_steps):
            tokens, classes = batch(step, micro)
            (sum(losses(model(tokens), classes)) / options.micro_steps).backward()  # type: ignore
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
            param.grad = None
        if options.clip:
            nn.utils.clip_grad_norm_(masters, options.clip)
        optimizer.step()
        for master, param in zip(masters, params, strict=True):
            param.data.copy_(master)
    return {name: p.detach().float() for name, p in model.named_parameters()}


def run(options: Options, *patches: str, late: bool = False, folder: str = "") -> Outcome:
    """late: the patches come after the engine. folder: half way it goes on in another engine."""
    start = models.build(options.model, options.torch_dtype)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    found = Outcome()
    with half_precision_allowed():
        expected = plainly(deepcopy(start), options)
        found.moved = worst_difference(expected, origin)[0]
        engine = build_engine(deepcopy(start), options.config) if late else None
        try:
            with applied(*patches) if patches else nullcontext():
                engine = engine or build_engine(deepcopy(start), options.config)
                for step in range(options.steps):
                    if folder and step == options.steps // 2:
                        engine.save_checkpoint(folder, tag="here")
                        engine = build_engine(deepcopy(start), options.config)
                        engine.load_checkpoint(folder, tag="here")
                    for micro in range(options.micro_steps):
                        tokens, classes = batch(step, micro)
                        engine.backward(sum(losses(engine(tokens), classes)))
                        engine.step()
        except Exception as error:
            found.error = f"{type(error).__name__}: {error}"
            return found
    ends = {name: p.detach().float() for name, p in engine.module.named_parameters()}
    found.difference = worst_difference(ends, expected)[0]
    return found


def check(world: World, options: Options, **more: Any) -> None:
    for found in world.run(run, options, "accumulation", **more):
        assert found.equal, found


@pytest.mark.core_case
def test_stock_is_wrong(world: World) -> None:
    for found in world.run(run, OPTIONS):
        assert found.equal != WRONG, found


@pytest.mark.core_case(clip=0.0)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_patched(world: World, micro_steps: int, clip: float) -> None:
    check(world, replace(OPTIONS, micro_steps=micro_steps, clip=clip))


def test_an_engine_that_was_there_before(world: World) -> None:
    check(world, OPTIONS, late=True)


@pytest.mark.core_case
@pytest.mark.xfail(
    Version("0.17.6") <= RELEASE <= Version("0.18.4"),
    reason="stock looks for a ZeRO optimizer: an error, or master weights are not saved",
    strict=True,
)
def test_a_checkpoint(world: World, tmp_path: Path) -> None:
    check(world, OPTIONS, folder=str(tmp_path))
