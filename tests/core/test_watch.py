"""What another library puts in the place of a wrapped method is noticed, named and told once."""

from __future__ import annotations

import cProfile
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import wrapt

import ds_patches
from ds_patches.core import gate, live, registry, watch
from tests.core.engines import build
from tests.listening import listening
from tests.world import World

ZERO_GRAD = "deepspeed.runtime.engine:DeepSpeedEngine.zero_grad"


@pytest.fixture(scope="module")
def name() -> str:
    """A patch that wraps DeepSpeedEngine.zero_grad."""
    for patch in registry.patches().values():
        wraps_it = any(target.key == ZERO_GRAD for target in patch.targets)
        if wraps_it and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("nothing to replace: no patch wraps DeepSpeedEngine.zero_grad on this release")


def build_as(kind: Any) -> Any:
    """Build an engine of this class."""
    import deepspeed

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(deepspeed, "DeepSpeedEngine", kind)
        return build(stage=1)


def train(engine: Any, steps: int) -> None:
    import torch

    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.zero_grad()


def theirs(original: Any, *, calls: bool) -> Any:
    @functools.wraps(original)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    def bare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None

    return calling if calls else bare


@contextmanager
def at_the_class(calls: bool) -> Iterator[None]:
    """It keeps what it replaces, as functools.wraps does, also where it never calls it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = build(stage=1)
    ours = vars(DeepSpeedEngine)["zero_grad"]
    DeepSpeedEngine.zero_grad = theirs(ours, calls=calls)
    try:
        train(engine, 1)
        build(stage=1)
        build(stage=1)
        yield
    finally:
        DeepSpeedEngine.zero_grad = ours


@contextmanager
def at_one_engine(calls: bool) -> Iterator[None]:
    engine = build(stage=1)
    train(engine, 1)
    bound = engine.zero_grad
    engine.zero_grad = functools.partial(bound) if calls else MethodType(lambda self: None, engine)
    train(engine, 2)
    yield


@contextmanager
def in_a_subclass(calls: bool) -> Iterator[None]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Bare(DeepSpeedEngine):  # type: ignore[misc]
        def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
            return None

    class Calling(DeepSpeedEngine):  # type: ignore[misc]
        def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
            return super().zero_grad(*args, **kwargs)

    build_as(Calling if calls else Bare)
    build_as(Calling if calls else Bare)
    yield


def seen(name: str, place: Any, calls: bool) -> tuple[list[str], bool, str]:
    """With something else in a method's place, which calls ours or not."""
    ds_patches.apply(name)
    try:
        with listening() as heard, place(calls):
            status = ds_patches.status()[name]
            assert status.live is ds_patches.is_applied(name)
        assert ds_patches.is_applied(name) or place is not at_the_class, "it is back"
        return heard, status.live, status.reason
    finally:
        ds_patches.unapply(name)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (at_the_class, "test_watch.py"),
        (at_one_engine, "at one DeepSpeedEngine"),
        (in_a_subclass, "in Bare"),
    ],
)
def test_a_replacement_is_named_once(world: World, name: str, place: Any, told: str) -> None:
    for heard, is_live, reason in world.run(seen, name, place, False):
        assert not is_live
        assert f"{ZERO_GRAD} is replaced by" in reason
        assert told in reason
        assert sum("is replaced by" in line for line in heard) == 1


@pytest.mark.parametrize("place", [at_the_class, at_one_engine, in_a_subclass])
def test_a_wrapper_that_calls_ours_is_none(world: World, name: str, place: Any) -> None:
    for heard, is_live, reason in world.run(seen, name, place, True):
        assert is_live
        assert "wrapped over" in reason or place is not at_the_class
        assert not heard


def calls_of_a_step(name: str) -> int:
    """Python calls of the look at a step where nothing was replaced."""
    ds_patches.apply(name)
    try:
        engine = build(stage=1)
        train(engine, 2)
        profile = cProfile.Profile(builtins=False)
        profile.runcall(watch._look, engine)
        return sum(entry.callcount for entry in profile.getstats())
    finally:
        ds_patches.unapply(name)


def test_a_look_is_cheap(world: World, name: str) -> None:
    assert max(world.run(calls_of_a_step, name)) <= 2


# --- What leads to what -------------------------------------------------------------------------


def ours(*args: Any) -> None:
    """Stands for our wrapper."""


class Functor:
    """An object that is called, and calls one of the two functions it keeps."""

    def __init__(self, calls: Any, keeps: Any) -> None:
        self.calls, self._keeps = calls, keeps

    def __call__(self, *args: Any) -> Any:
        return self.calls(*args)


class Keeper:
    """It has ours under a name that its code never speaks of."""

    def __call__(self, *args: Any) -> None:
        return None


def keeping() -> Any:
    keeper = Keeper()
    vars(keeper)["original"] = ours
    return keeper


@pytest.mark.parametrize(
    ("value", "leads"),
    [
        (functools.partial(ours), True),
        (staticmethod(ours), True),
        (theirs(ours, calls=True), True),
        (theirs(ours, calls=False), False),
        (Functor(ours, None), True),
        (functools.partial(Functor(ours, None)), True),
        (keeping(), False),
        (functools.lru_cache(ours), True),
        (wrapt.ObjectProxy(ours), True),
        (wrapt.FunctionWrapper(ours, lambda wrapped, _, args, kwargs: wrapped(*args)), True),
        (lambda *args: None, False),
    ],
)
def test_a_call_may_come_to_what_the_code_speaks_of(value: Any, leads: bool) -> None:
    assert live.leads_to(value, ours) is leads


def test_where_a_functor_comes_from() -> None:
    assert "test_watch.py" in live.origin(Functor(ours, None))
    assert "test_watch.py" in live.origin(keeping())
