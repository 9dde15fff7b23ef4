"""Engines with a window that these tests drive, so that each way to reduce can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.accumulation.flat_sum import FlatSum as StepSum
from ds_patches.coalesce.sums import FlatSum, ScatteredSum
from ds_patches.coalesce.upstream import flat_layout
from ds_patches.coalesce.upstream.engine import at_boundary
from tests.coalesce.flat import Traffic
from tests.coalesce.loops import BACKWARDS, several_backwards
from tests.training import models
from tests.training.models import loss_of
from tests.training.options import FP16, Options
from tests.training.run import Outcome, run
from tests.training.surroundings import RATE, build_engine, half_precision_allowed
from tests.training.trainers import EngineTrainer, worst_difference


def dealt(options: Options, groups: int) -> Any:
    """An engine with the trainable parameters dealt out to `groups` groups in turn."""
    model = models.build(options.model, options.torch_dtype)
    trainable = [param for param in model.parameters() if param.requires_grad]
    parts = [{"params": trainable[index::groups]} for index in range(groups)]
    return build_engine(model, options.config, optimizer=torch.optim.SGD(parts, lr=RATE))


class Trainer(EngineTrainer):
    """An engine with a window that leaves gradients alone, and then reduces as it is told to.

    Nothing is patched.
    """

    how = "flush"  # or "upstream", for DeepSpeed's own reducer

    def __init__(self, engine: Any, options: Options, *arguments: Any) -> None:
        super().__init__(engine, options, *arguments)
        self.traffic = Traffic()

    @contextmanager
    def window(self, **_: Any) -> Iterator[None]:
        optimizer = self.engine.optimizer
        assert flat_layout.covers(optimizer)
        if self.how == "upstream":
            gradients = FlatSum(optimizer)
        else:
            gradients = ScatteredSum(optimizer, StepSum(self.engine))
        with self.traffic:
            self.engine.inside_no_sync_ctxt = True
            optimizer.reduce_ready_partitions_and_remove_grads = lambda *_: None
            try:
                yield
            finally:
                self.engine.inside_no_sync_ctxt = False
                del optimizer.reduce_ready_partitions_and_remove_grads
            gradients.prepare()
            with at_boundary(self.engine):
                gradients.reduce(uneven=False)


def train(options: Options, how: str, groups: int) -> tuple[Outcome, list[tuple[str, int]], float]:
    """How far an engine ends from plain PyTorch, and what it sent. Runs on every rank."""
    made: list[Trainer] = []

    class Dealt(Trainer):
        def __init__(self, engine: Any, *arguments: Any) -> None:
            super().__init__(dealt(options, groups) if groups > 1 else engine, *arguments)
            self.how = how
            made.append(self)

    outcome = run(several_backwards, options, engine=Dealt)
    return outcome, made[0].traffic.seen, made[0].traffic.elements


def reduced(options: Options, how: str, groups: int = 1, full: bool = True) -> dict[str, Any]:
    """What a window leaves in the optimizer, before the step that takes it."""
    from deepspeed.utils import safe_get_full_grad

    engine = dealt(options, groups)
    trainer = Trainer(engine, options)
    trainer.how = how
    with trainer.window():
        for index in range(BACKWARDS):
            trainer.backward(loss_of(trainer, 0, index))
    optimizer = engine.optimizer
    return {
        "gradients": {
            index: [(tuple(view.shape), view.float()) for view in views]
            for index, views in optimizer.averaged_gradients.items()
        },
        "full": {
            name: safe_get_full_grad(param)
            for name, param in engine.module.named_parameters()
            if param.requires_grad and full
        },
        "left over": [
            name
            for name, param in engine.module.named_parameters()
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
    with half_precision_allowed():
        scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        options = Options(2, **FP16, settings={"fp16": scale})
        trainer = Trainer(dealt(options, 1), options)
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
    return flat_layout.covers(dealt(options, 1).optimizer)
