"""Run one script by a DeepSpeed engine and by plain PyTorch: on stock, or with accumulation."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.coalesce import cases, micro_steps
from tests.listening import listening
from tests.training import models, trainers
from tests.training.run import applied
from tests.zero3_retain.test_failure import Fragile

Script = trainers.Script
Outcome = cases.Outcome
ROUNDING = cases.ROUNDING

OFFLOADED = micro_steps.OFFLOADED
OVERLAP = micro_steps.OVERLAP


class Auxiliary(models.TwoHeads):
    """Its forward keeps a loss aside, which is no output."""

    aux: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        self.aux = x.square().mean()
        return self.blocks[1](x)


#: What tests.zero3_retain.models has not.
MODELS: dict[str, type[torch.nn.Module]] = {"Auxiliary": Auxiliary, "Fragile": Fragile}


class PlainTrainer(micro_steps.PlainTrainer):
    """Plain PyTorch, which knows one model, one ``zero_grad()`` and one ``backward()``."""

    is_engine = False

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def around_the_engine(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)

    def unscaled_backward(self, loss: Tensor) -> None:
        loss.backward()

    def zero_optimizer_grad(self) -> None:
        self.zero_grad()


class EngineTrainer(micro_steps.EngineTrainer):
    """An engine, and what can be asked of its parts."""

    is_engine = True

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.engine.module
        return module

    def around_the_engine(self, *inputs: Tensor) -> Any:
        """A forward that the engine does not see."""
        return self.engine.module(*inputs)

    def unscaled_backward(self, loss: Tensor) -> None:
        """Whoever trains divides by the micro steps, as the Trainer of transformers does."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def zero_optimizer_grad(self) -> None:
        self.engine.optimizer.zero_grad()


def run(
    script: Script,
    stage: int,
    patch: str = "accumulation",
    *,
    model: str = "TwoHeads",
    style: str = "engine",
    micro_steps: int = 1,
    settings: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> Outcome:
    """What an engine made of `script`, held against plain PyTorch. Runs on every rank.

    patch: the one that is applied, or "" for stock.
    """
    start = models.build(MODELS.get(model) or getattr(models, model), getattr(torch, dtype))
    expected = cases.plain(start, script, micro_steps, PlainTrainer)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    with applied(patch) if patch else nullcontext(), listening() as heard:
        wanted = trainers.config(stage, micro_steps=micro_steps, **(settings or {}))
        trainer = EngineTrainer(trainers.build_engine(start, wanted), style)
        outcome = Outcome(heard=heard)
        trainers.run_into(outcome, script, trainer, expected, origin)
        return outcome
