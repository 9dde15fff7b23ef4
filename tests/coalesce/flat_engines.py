"""Engines with a window that these tests drive, so that each way to reduce can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_patches.accumulation.flat_sum import FlatSum as StepSum
from ds_patches.coalesce.sums import FlatSum, ScatteredSum
from ds_patches.coalesce.upstream import flat_layout
from ds_patches.coalesce.upstream.engine import at_boundary
from tests.coalesce import cases
from tests.coalesce.flat import Traffic
from tests.zero3_retain import models, trainers


class Unused(models.TwoHeads):
    """A layer that no loss reaches, in the middle of the flat order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, models.Block())

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.embed(tokens)))


class Widening(models.TwoHeads):
    """The reconstruction head is reached by the first backward of a window, not by the last."""

    calls = 0

    def heads(self, x: Tensor) -> models.Losses:
        self.calls += 1
        first = self.calls % cases.BACKWARDS == 1
        return models.Losses(self.classify(x), self.rebuild(x) if first else x)


MODELS = {"Unused": Unused, "Widening": Widening}


def build(model: str, dtype: str) -> nn.Module:
    found: type[nn.Module] = MODELS.get(model) or getattr(models, model)
    return models.build(found, getattr(torch, dtype))


def build_engine(model: nn.Module, settings: dict[str, Any], groups: int) -> Any:
    """With the trainable parameters dealt out to `groups` groups in turn."""
    import deepspeed

    trainable = [param for param in model.parameters() if param.requires_grad]
    dealt = [{"params": trainable[index::groups]} for index in range(groups)]
    optimizer = torch.optim.SGD(dealt, lr=trainers.RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


class Trainer(trainers.EngineTrainer):
    """An engine with a window that leaves gradients alone, and then reduces as it is told to.

    `how`: "flush", or "upstream" for DeepSpeed's own reducer. Nothing is patched.
    """

    def __init__(self, engine: Any, how: str) -> None:
        super().__init__(engine)
        self._how = how
        self.traffic = Traffic()

    @contextmanager
    def window(self) -> Iterator[None]:
        optimizer = self.engine.optimizer
        assert flat_layout.covers(optimizer)
        if self._how == "upstream":
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


def train(
    how: str,
    *,
    model: str = "TwoHeads",
    stage: int,
    dtype: str = "float32",
    groups: int = 1,
    settings: dict[str, Any] | None = None,
    steps: int = 3,
    clip: float = 0.0,
) -> dict[str, Any]:
    """How far an engine ends from plain PyTorch, and what it sent. Runs on every rank."""
    start = build(model, dtype)
    script = partial(cases.several_backwards, steps=steps)
    expected = clipped(start, script, clip)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    wanted = trainers.config(stage, gradient_clipping=clip, **(settings or {}))
    trainer = Trainer(build_engine(start, wanted, groups), how)
    script(trainer)
    difference, where = trainers.worst_difference(trainer.parameters(), expected)
    return {
        "difference": difference,
        "where": where,
        "moved": trainers.worst_difference(expected, origin)[0],
        "sent": trainer.traffic.seen,
        "elements": trainer.traffic.elements,
    }


class ClippingTrainer(cases.PlainTrainer):
    """Scales the mean gradient down to a norm, as DeepSpeed does."""

    def __init__(self, model: nn.Module, clip: float) -> None:
        super().__init__(model)
        self._clip = clip

    def step(self) -> None:
        ranks = dist.get_world_size()
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(ranks)
        if self._clip:
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(max(1.0, (norm.item() + 1e-6) / self._clip))
        with torch.no_grad():
            for param in self.model.parameters():
                if param.grad is not None:
                    param -= trainers.RATE * param.grad
        self.model.zero_grad()


def clipped(start: nn.Module, script: Any, clip: float) -> trainers.Parameters:
    trainer = ClippingTrainer(deepcopy(start), clip)
    script(trainer)
    return trainer.parameters()


def reduced(how: str, *, model: str, groups: int = 1, **arguments: Any) -> dict[str, Any]:
    """What a window leaves in the optimizer, before the step that takes it."""
    from deepspeed.utils import safe_get_full_grad

    full = arguments.pop("full", True)
    dtype = arguments.pop("dtype", "float32")
    stage = arguments.pop("stage")
    wanted = trainers.config(stage, **(arguments.pop("settings", None) or {}))
    engine = build_engine(build(model, dtype), wanted, groups)
    trainer = Trainer(engine, how)
    with trainer.window():
        for index in range(cases.BACKWARDS):
            tokens, classes = models.batch(0, index)
            trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
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
    from tests.zero3_retain.cases import half_precision_allowed

    with half_precision_allowed():
        settings = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
        engine = build_engine(
            build("TwoHeads", "float16"), trainers.config(2, **settings), groups=1
        )
        trainer = Trainer(engine, "flush")
        moves = []
        for step in range(2):
            before = trainer.parameters()
            with trainer.window():
                for index in range(cases.BACKWARDS):
                    tokens, classes = models.batch(step, index)
                    trainer.backward(sum(models.losses(trainer.forward(tokens), classes)))
                if step == 0 and dist.get_rank() == 1:
                    engine.module.classify.weight.grad.view(-1)[0] = math.inf
            trainer.step()
            moved, _ = trainers.worst_difference(trainer.parameters(), before)
            moves.append((bool(engine.optimizer.overflow), moved))
        return moves


def covered(stage: int, dtype: str, settings: dict[str, Any]) -> bool:
    engine = build_engine(build("TwoHeads", dtype), trainers.config(stage, **settings), groups=1)
    return flat_layout.covers(engine.optimizer)
