"""Every target kind, eager and compiled: Dynamo honours a closure and ignores a wrapt proxy."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import wrapt

import ds_patches
from ds_patches.core import journal
from ds_patches.core.patch import Kind, Target
from ds_patches.core.wrappers import Wrapper, build
from tests.core.engines import build as build_engine
from tests.world import World

SOURCE = """
def free(x):
    return x + 1

class Layer:
    def method(self, x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 1

layer = Layer()
"""
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "free": lambda module, x: module.free(x),
    "Layer.method": lambda module, x: module.layer.method(x),
    "Layer.of_class": lambda module, x: module.Layer.of_class(x),
    "Layer.static": lambda module, x: module.Layer.static(x),
}


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType("compiled_sample")
    exec(SOURCE, vars(made))
    sys.modules[made.__name__] = made
    torch._dynamo.reset()
    yield made
    del sys.modules[made.__name__]


def wrapped(module: ModuleType, qualname: str, kind: Kind) -> Wrapper:
    """Put a wrapper in place that makes the result ten times as large."""
    owner = module.Layer if "." in qualname else module
    name = qualname.rpartition(".")[2]
    target = Target(module.__name__, qualname, "", kind)
    around = lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) * 10  # noqa: E731
    wrapper = build(target, owner, name, vars(owner)[name], around)
    setattr(owner, name, wrapper.installed)
    return wrapper


def compiled(call: Callable[[Any, Any], Any], module: ModuleType) -> Callable[[Any], Any]:
    return torch.compile(lambda x: call(module, x), backend="eager", fullgraph=True)


def test_a_closure_is_honoured_eager_and_compiled(module: ModuleType) -> None:
    call, one = CALLS["Layer.method"], torch.ones(1)
    wrapper = wrapped(module, "Layer.method", Kind.CLOSURE)
    graph = compiled(call, module)
    assert call(module, one).item() == 20
    assert graph(one).item() == 20
    wrapper.switch(False)
    assert call(module, one).item() == 2
    assert graph(one).item() == 2, "a graph compiled before sees the switch"


@pytest.mark.parametrize("qualname", [name for name in CALLS if name != "Layer.method"])
def test_a_closure_is_for_methods_of_instances(module: ModuleType, qualname: str) -> None:
    with pytest.raises(TypeError, match=r"is no method of an instance: Kind\.WRAPT wraps it"):
        wrapped(module, qualname, Kind.CLOSURE)


def test_what_lies_beneath_a_closure_is_bound_as_it_would_be(module: ModuleType) -> None:
    """A second library's wrapt proxy is told the instance."""
    seen: list[Any] = []

    def theirs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(instance)
        return wrapped(*args, **kwargs)

    module.Layer.method = wrapt.FunctionWrapper(module.Layer.method, theirs)
    wrapped(module, "Layer.method", Kind.CLOSURE)
    assert module.layer.method(1) == 20
    assert seen == [module.layer]


@pytest.mark.parametrize("qualname", CALLS)
def test_a_wrapt_proxy_is_ignored_when_compiled(module: ModuleType, qualname: str) -> None:
    """Pins the fact that needs closures at all; if it falls, wrapt may serve everywhere."""
    call, one = CALLS[qualname], torch.ones(1)
    wrapped(module, qualname, Kind.WRAPT)
    assert call(module, one).item() == 20
    assert compiled(call, module)(one).item() == 2


COUNTS = collections.Counter[str]


def train(stage: int, how: str) -> COUNTS:
    """Three steps with every patch, the whole step compiled or not; how often wrappers ran."""
    counts: COUNTS = collections.Counter()

    def counting(target: Target, *rest: Any) -> Wrapper:
        *place, around = rest

        def counted(*call: Any) -> Any:
            counts[target.key] += 1
            return around(*call)

        return build(target, *place, counted)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(journal, "build", counting)
        ds_patches.apply_all()
        engine = build_engine(stage)

        def step(inputs: Any) -> Any:
            loss = engine(inputs).pow(2).mean()
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
            return loss

        torch._dynamo.reset()
        run = torch.compile(step, backend="eager") if how == "compiled" else step
        losses = [run(torch.full((1, 4), float(k))).item() for k in range(3)]
        assert losses[2] != losses[1]
        ds_patches.unapply_all()
    return counts


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_compiled_training_step_passes_every_wrapper(stage: int) -> None:
    """As often as an eager one: none is skipped, and none breaks it."""
    found = []
    for how in ("eager", "compiled"):
        with World() as ranks:  # of its own, as a wrapper that was made is used again
            found.append(ranks.run(train, stage, how)[0])
    eager, compiled = found
    assert compiled == eager
    assert eager["deepspeed.runtime.engine:DeepSpeedEngine.backward"] >= 3


def test_a_closure_costs_less_than_a_microsecond(module: ModuleType) -> None:
    import timeit

    owner = module.Layer
    target = Target(module.__name__, "Layer.method", "")
    # Short and many: some of them meet no other process on the core.
    plain = min(timeit.repeat(lambda: module.layer.method(1), number=1_000, repeat=100))
    through = lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)  # noqa: E731
    wrapper = build(target, owner, "method", owner.method, through)
    owner.method = wrapper.installed
    ours = min(timeit.repeat(lambda: module.layer.method(1), number=1_000, repeat=100))
    assert (ours - plain) / 1_000 < 1e-6
