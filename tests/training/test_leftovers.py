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


def module_hook(register: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.module.classify, register)(lambda *_: None)


def parameter_hook(engine: Any) -> Any:
    return engine.module.embed.weight.register_hook(lambda grad: None)


def hook_after_accumulation(engine: Any) -> Any:
    return engine.module.embed.weight.register_post_accumulate_grad_hook(lambda param: None)


def node_of(engine: Any) -> Any:
    param = engine.module.embed.weight
    return param.expand_as(param).grad_fn.next_functions[0][0]


def node_hook(engine: Any) -> Any:
    node = node_of(engine)
    return node, node.register_hook(lambda *_: None)  # which lives as long as the node does


def node_pre_hook(engine: Any) -> Any:
    node = node_of(engine)
    return node, node.register_prehook(lambda *_: None)


def hook_that_is_gone(engine: Any) -> None:
    for module in engine.module.modules():
        module._forward_hooks.clear()


def attribute_by_name(engine: Any) -> None:
    engine.optimizer._ds_patches_sample = None


def function_of_ours(engine: Any) -> None:
    engine.module.classify.forward = device.accelerator


def held(engine: Any) -> None:
    engine.module.embed.weight.ds_active_sub_modules.add(-1)


def gathered(engine: Any) -> None:
    engine.module.embed.weight.all_gather()


#: What leaves something behind, and the words for it.
LEAVING: dict[Callable[[Any], Any], str] = {
    module_hook("register_forward_hook"): "module 'classify': _forward_hooks",
    module_hook("register_forward_pre_hook"): "module 'classify': _forward_pre_hooks",
    module_hook("register_full_backward_hook"): "module 'classify': _backward_hooks",
    module_hook("register_full_backward_pre_hook"): "module 'classify': _backward_pre_hooks",
    parameter_hook: "parameter embed.weight: _backward_hooks",
    hook_after_accumulation: "parameter embed.weight: _post_accumulate_grad_hooks",
    node_hook: "parameter embed.weight: post hook of its AccumulateGrad",
    node_pre_hook: "parameter embed.weight: pre hook of its AccumulateGrad",
    hook_that_is_gone: "module '': _forward_hooks",
    attribute_by_name: "optimizer._ds_patches_sample is ours",
    function_of_ours: "module 'classify'.forward is ours",
    held: "parameter embed.weight: in use",
    gathered: "parameter embed.weight: gathered",
}


def left_by_each() -> list[dict[str, int]]:
    """What is found after each has left its own, on an engine of its own."""
    found = []
    for leave in LEAVING:
        engine = engine_of(stage=3)
        before = leftovers.of(engine)
        assert leftovers.of(engine) == before, "looking leaves nothing behind"
        kept = leave(engine)
        found.append(leftovers.since(before, engine))
        del kept
    return found


def test_each_kind_is_noticed(world: World) -> None:
    for rank in world.run(left_by_each):
        for what, found in zip(LEAVING.values(), rank, strict=True):
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
