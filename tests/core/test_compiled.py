"""Every target kind, eager and compiled: Dynamo honours a closure and ignores a wrapt proxy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from ds_patches.core.patch import Kind, Target
from ds_patches.core.wrappers import Wrapper, build

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


@pytest.mark.parametrize("qualname", CALLS)
def test_a_closure_is_honoured_eager_and_compiled(module: ModuleType, qualname: str) -> None:
    call, one = CALLS[qualname], torch.ones(1)
    wrapper = wrapped(module, qualname, Kind.CLOSURE)
    graph = compiled(call, module)
    assert call(module, one).item() == 20
    assert graph(one).item() == 20
    wrapper.switch(False)
    assert call(module, one).item() == 2
    assert graph(one).item() == 2, "a graph compiled before sees the switch"


@pytest.mark.parametrize("qualname", CALLS)
def test_a_wrapt_proxy_is_ignored_when_compiled(module: ModuleType, qualname: str) -> None:
    """Pins the fact that makes CLOSURE the default; if it falls, WRAPT may serve everywhere."""
    call, one = CALLS[qualname], torch.ones(1)
    wrapped(module, qualname, Kind.WRAPT)
    assert call(module, one).item() == 20
    assert compiled(call, module)(one).item() == 2


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
