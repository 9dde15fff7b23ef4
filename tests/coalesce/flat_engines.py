"""Engines whose block ends by our own reductions or by DeepSpeed's, so that these are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.coalesce.upstream import flat_layout
from tests.coalesce.flat import Traffic
from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.training import models
from tests.training.models import loss_of
from tests.training.options import FP16, Options
from tests.training.run import Outcome, applied, run
from tests.training.surroundings import RATE, build_engine, half_precision_allowed
from tests.training.trainers import EngineTrainer, worst_difference


def dealt(options: Options, groups: int = 1) -> Any:
    """An engine with the trainable parameters dealt out to `groups` groups in turn."""
    model = models.build(options.model, options.torch_dtype)
    trainable = [param for param in model.parameters() if param.requires_grad]
    parts = [{"params": trainable[index::groups]} for index in range(groups)]
    return build_engine(model, options.config, optimizer=torch.optim.SGD(parts, lr=RATE))


def train(options: Options, groups: int) -> tuple[Outcome, list[tuple[str, int]], float]:
    """How far an engine ends from plain PyTorch, and what its blocks sent. Runs on every rank."""
    traffic = Traffic()

    class Dealt(EngineTrainer):
        def __init__(self, engine: Any, *arguments: Any) -> None:
            super().__init__(dealt(options, groups) if groups > 1 else engine, *arguments)

        @contextmanager
        def window(self, **_: Any) -> Iterator[None]:
            with traffic, super().window():
                yield

    return run(several_backwards, options, "coalesce", engine=Dealt), traffic.seen, traffic.elements


def reduced(options: Options, groups: int = 1, full: bool = True) -> dict[str, Any]:
    """What a block leaves in the optimizer, before the step that takes it."""
    from deepspeed.utils import safe_get_full_grad

    with applied("coalesce"):
        engine = dealt(options, groups)
        trainer = EngineTrainer(engine, options)
        with trainer.window():
            for index in range(BACKWARDS):
                trainer.backward(loss_of(trainer, 0, index))
        optimizer = engine.optimizer
        params = dict(engine.module.named_parameters())
        return {
            "gradients": {
                index: [(tuple(view.shape), view.float()) for view in views]
                for index, views in optimizer.averaged_gradients.items()
            },
            "full": {
                name: safe_get_full_grad(param)
                for name, param in params.items()
                if param.requires_grad and full
            },
            "left over": [
                name
                for name, param in params.items()
                if param.grad is not None or getattr(param, "grad_accum", None) is not None
            ],
            "pending": [
                views for views in getattr(optimizer, "all_grad_tensors", {}).values() if views
            ],
            "epilogue ran": getattr(optimizer, "_epilogue_ran_this_backward", None),
            "norm": float(optimizer.scaled_global_norm()),
            "owns its memory": [
                hasattr(views, "flat_partition") for views in optimizer.averaged_gradients.values()
            ],
        }


def overflowing() -> list[tuple[bool, float]]:
    """Per step of fp16 training: whether it was skipped, and how far the parameters moved.

    One gradient of the first step is infinite, on one rank.
    """
    with half_precision_allowed(), applied("coalesce"):
        scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        options = Options(2, **FP16, settings={"fp16": scale})
        trainer = EngineTrainer(dealt(options), options)
        moves = []
        for step in range(2):
            before = trainer.parameters()
            with trainer.window():
                for index in range(BACKWARDS):
                    trainer.backward(loss_of(trainer, step, index))
                if step == 0 and dist.get_rank() == 1:
                    module: Any = trainer.module
                    module.classify.weight.grad.view(-1)[0] = math.inf
            trainer.step()
            moved, _ = worst_difference(trainer.parameters(), before)
            moves.append((bool(trainer.engine.optimizer.overflow), moved))
        return moves


def covered(options: Options) -> bool:
    return flat_layout.covers(dealt(options).optimizer)
