"""A wrapper is met in whatever way its function is called, eagerly and where Dynamo traces it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import wrapt

from ds_patches.core import live
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Place

SOURCE = """
import torch

def free(x):
    return x + 1

class Layer:
    def method(self, x):
        return x + 1

class Sub(Layer):
    def method(self, x):
        return super().method(x)

class Module(torch.nn.Module):
    def forward(self, x):
        return x + 1

class Context:
    def __enter__(self):
        return 1
    def __exit__(self, *raised):
        return None

layer, sub, module = Layer(), Sub(), Module()
"""


def with_a_foreign_wrapper(sample: Any, x: Any) -> Any:
    """A closure, by a library that came after us."""
    theirs = sample.Layer.method
    foreign = type("Foreign", (), {"method": lambda self, x: theirs(self, x)})()
    return foreign.method(x)


def in_a_block(sample: Any, x: Any) -> Any:
    with sample.Context() as factor:
        return (x + 1) * factor


#: The wrapped function, and ways to call it.
CALLS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "method": ("Layer.method", lambda sample, x: sample.layer.method(x)),
    "of the class": ("Layer.method", lambda sample, x: sample.Layer.method(sample.layer, x)),
    "partial": ("Layer.method", lambda s, x: functools.partial(s.layer.method, x)()),
    # as PyTorch's learning rate schedulers take the step of an optimizer apart
    "of its function": ("Layer.method", lambda s, x: s.layer.method.__func__(s.layer, x)),
    "super": ("Layer.method", lambda sample, x: sample.sub.method(x)),
    "foreign": ("Layer.method", with_a_foreign_wrapper),
    "module": ("Module.forward", lambda sample, x: sample.module(x)),
    "context": ("Context.__enter__", in_a_block),
    "function": ("free", lambda sample, x: sample.free(x)),
}


@pytest.fixture
def sample() -> Iterator[ModuleType]:
    made = ModuleType("compiled_sample")
    exec(SOURCE, vars(made))
    sys.modules[made.__name__] = made
    torch._dynamo.reset()
    yield made
    del sys.modules[made.__name__]


def wrapped(sample: ModuleType, qualname: str) -> Layer:
    """Put a wrapper in place that makes the result ten times as large."""
    around = lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) * 10  # noqa: E731
    return Layer(*live.site(Place(sample.__name__, qualname)) or pytest.fail(qualname), around)


@pytest.mark.core_case(way="module")
@pytest.mark.parametrize("way", CALLS)
def test_every_call_meets_the_wrapper(sample: ModuleType, way: str) -> None:
    qualname, call = CALLS[way]
    wrapper = wrapped(sample, qualname)
    graph = torch.compile(lambda x: call(sample, x), backend="eager")
    for x in (torch.ones(1), torch.ones(1), torch.ones(2)):
        assert call(sample, x)[0].item() == 20
        assert graph(x)[0].item() == 20, (
            "this torch no longer honours `_torchdynamo_disable` at the type of a callable: what "
            "ds_patches.core.layer relies on to be called from compiled code"
        )
    wrapper.on.clear()
    assert call(sample, torch.ones(1)).item() == 2
    assert graph(torch.ones(1)).item() == 2, "a graph compiled before sees the switch"


def test_a_bound_method_that_somebody_holds_sees_the_switch(sample: ModuleType) -> None:
    wrapper = wrapped(sample, "Layer.method")
    held = sample.layer.method
    assert held(1) == 20
    wrapper.on.clear()
    assert held(1) == 2
    assert held.__func__ is sample.Layer.method is wrapper.installed
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        sample.Layer.method()


def test_what_lies_beneath_is_bound_as_it_would_be(sample: ModuleType) -> None:
    """A second library's wrapt proxy is told the instance."""
    seen: list[Any] = []

    def theirs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(instance)
        return wrapped(*args, **kwargs)

    sample.Layer.method = wrapt.FunctionWrapper(sample.Layer.method, theirs)
    wrapped(sample, "Layer.method")
    assert sample.layer.method(1) == 20
    assert seen == [sample.layer]


def test_a_wrapper_costs_two_calls_of_python(sample: ModuleType) -> None:
    """Its binding, and what is around the function; about a microsecond."""
    wrapper = wrapped(sample, "Layer.method")
    called: list[str] = []
    for on in (True, False):
        wrapper.on[:] = [True] * on
        sys.setprofile(
            lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None
        )
        sample.layer.method(1)
        sys.setprofile(None)
    assert called == ["__get__", "<lambda>", "method", "__get__", "method"]
