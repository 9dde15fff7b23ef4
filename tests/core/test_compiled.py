"""A wrapper is met in whatever way its function is called, eagerly and where Dynamo traces it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_patches.core import live
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Place


def free(x: Any) -> Any:
    return x + 1


class Thing:
    def method(self, x: Any) -> Any:
        return x + 1


class Sub(Thing):
    def method(self, x: Any) -> Any:
        return super().method(x)


class Module(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1


class Context:
    def __enter__(self) -> int:
        return 1

    def __exit__(self, *raised: object) -> None:
        """Nothing."""


THING, SUB, MODULE = Thing(), Sub(), Module()


def with_a_foreign_wrapper(x: Any) -> Any:
    """A closure, by a library that came after us."""
    theirs = Thing.method
    foreign = type("Foreign", (), {"method": lambda self, x: theirs(self, x)})()
    return foreign.method(x)


def in_a_block(x: Any) -> Any:
    with Context() as factor:
        return (x + 1) * factor


#: The wrapped function, and ways to call it.
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "method": ("Thing.method", lambda x: THING.method(x)),
    "of the class": ("Thing.method", lambda x: Thing.method(THING, x)),
    "partial": ("Thing.method", lambda x: functools.partial(THING.method, x)()),
    # as PyTorch's learning rate schedulers take the step of an optimizer apart
    "of its function": ("Thing.method", lambda x: THING.method.__func__(THING, x)),
    "super": ("Thing.method", lambda x: SUB.method(x)),
    "foreign": ("Thing.method", with_a_foreign_wrapper),
    "module": ("Module.forward", lambda x: MODULE(x)),
    "context": ("Context.__enter__", in_a_block),
    "function": ("free", lambda x: free(x)),
}


@contextmanager
def wrapped(qualname: str = "Thing.method") -> Iterator[Layer]:
    """Put a wrapper in place that makes the result ten times as large."""
    torch._dynamo.reset()
    around = lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) * 10  # noqa: E731
    layer = Layer(*live.site(Place(__name__, qualname)) or pytest.fail(qualname), around)
    yield layer
    layer.remove()


@pytest.mark.core_case(way="module")
@pytest.mark.parametrize("way", CALLS)
def test_every_call_meets_the_wrapper(way: str) -> None:
    qualname, call = CALLS[way]
    with wrapped(qualname) as layer:
        graph = torch.compile(lambda x: call(x), backend="eager")
        for x in (torch.ones(1), torch.ones(1), torch.ones(2)):
            assert call(x)[0].item() == 20
            assert graph(x)[0].item() == 20, (
                "this torch no longer honours `_torchdynamo_disable` at the type of a callable: "
                "what ds_patches.core.layer relies on to be called from compiled code"
            )
        layer.on.clear()
        assert call(torch.ones(1)).item() == 2
        assert graph(torch.ones(1)).item() == 2, "a graph compiled before sees the switch"


def test_a_bound_method_that_somebody_holds_sees_the_switch() -> None:
    with wrapped() as layer:
        held = THING.method
        assert held(1) == 20
        layer.on.clear()
        assert held(1) == 2
        assert held.__func__ is Thing.method is layer.installed
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            Thing.method()
