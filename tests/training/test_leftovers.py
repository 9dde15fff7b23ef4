"""Each kind of leftover is noticed, on a real engine, and nothing is where nothing was left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ds_patches.runtime import device
from tests.training import leftovers
from tests.training.models import loss_of
from tests.training.trainers import engine_of
from tests.world import World


def hook(*_: Any) -> None:
    """Which does nothing."""


def hook_of_node(engine: Any, register: str) -> Any:
    param = engine.module.embed.weight
    node = param.expand_as(param).grad_fn.next_functions[0][0]
    return node, getattr(node, register)(hook)  # which lives as long as the node does


#: What is found, and what leaves it behind.
LEAVING: dict[str, Callable[[Any], Any]] = {
    "module 'classify': _forward_hooks": lambda e: e.module.classify.register_forward_hook(hook),
    "module 'classify': _forward_pre_hooks": lambda e: e.module.classify.register_forward_pre_hook(
        hook
    ),
    "module 'classify': _backward_hooks": lambda e: e.module.classify.register_full_backward_hook(
        hook
    ),
    "module 'classify': _backward_pre_hooks": lambda e: (
        e.module.classify.register_full_backward_pre_hook(hook)
    ),
    "parameter embed.weight: _backward_hooks": lambda e: e.module.embed.weight.register_hook(hook),
    "parameter embed.weight: _post_accumulate_grad_hooks": lambda e: (
        e.module.embed.weight.register_post_accumulate_grad_hook(hook)
    ),
    "parameter embed.weight: post hook of its AccumulateGrad": lambda e: hook_of_node(
        e, "register_hook"
    ),
    "parameter embed.weight: pre hook of its AccumulateGrad": lambda e: hook_of_node(
        e, "register_prehook"
    ),
    # Hooks that are gone.
    "module '': _forward_hooks": lambda e: [m._forward_hooks.clear() for m in e.module.modules()],
    "optimizer._ds_patches_sample is ours": lambda e: setattr(e.optimizer, "_ds_patches_sample", 0),
    "module 'classify'.forward is ours": lambda e: setattr(
        e.module.classify, "forward", device.accelerator
    ),
    "parameter embed.weight: in use": lambda e: e.module.embed.weight.ds_active_sub_modules.add(-1),
    "parameter embed.weight: gathered": lambda e: e.module.embed.weight.all_gather(),
}


def left_by_each() -> list[dict[str, int]]:
    """What is found after each has left its own, on an engine of its own."""
    found = []
    for leave in LEAVING.values():
        engine = engine_of(stage=3)
        before = leftovers.of(engine)
        assert leftovers.of(engine) == before, "looking leaves nothing behind"
        kept = leave(engine)
        found.append(leftovers.since(before, engine))
        del kept
    return found


def test_each_kind_is_noticed(world: World) -> None:
    for rank in world.run(left_by_each):
        for what, found in zip(LEAVING, rank, strict=True):
            assert what in found, found
            assert len(found) == 1 or "_forward_hooks" in what, found


def left_by_stock(stage: int) -> dict[str, int]:
    engine = engine_of(stage=stage)
    before = leftovers.of(engine)
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
    return leftovers.since(before, engine, but=())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stock_leaves_nothing(world: World, stage: int) -> None:
    assert world.run(left_by_stock, stage) == [{}, {}]
