"""What stands at engines in the place of a wrapped method: the status has it, the log once."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import pytest
import wrapt

import ds_patches
from ds_patches.core import engines, gate, live, once, registry
from tests.harness.models import loss_of
from tests.harness.run import applied
from tests.harness.trainers import engine_of
from tests.listening import listening
from tests.world import World, on_ranks

ZERO_GRAD = "deepspeed.runtime.engine:DeepSpeedEngine.zero_grad"


@pytest.fixture(scope="module")
def name() -> str:
    """A patch that wraps DeepSpeedEngine.zero_grad."""
    for patch in registry.patches().values():
        wraps_it = any(target.key == ZERO_GRAD for target in patch.targets)
        if wraps_it and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("nothing to replace: no patch wraps DeepSpeedEngine.zero_grad on this release")


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(loss_of(engine, step))
        engine.step()
        engine.zero_grad()


def theirs(original: Any, *, calls: bool) -> Any:
    """It keeps what it replaces, as functools.wraps does, also where it never calls it."""

    @functools.wraps(original)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    def bare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None

    return calling if calls else bare


def seen(name: str, calls: bool) -> tuple[list[str], bool, str]:
    """With something else in a method's place at one engine, which calls ours or not."""
    with applied(name), listening() as heard:
        engine = engine_of(stage=1)
        train(engine, 1)
        ours = engine.zero_grad
        assert not heard
        engine.zero_grad = functools.partial(ours) if calls else MethodType(lambda _: None, engine)
        train(engine, 2)
        for _ in range(2):
            engine_of(stage=1)
        status = ds_patches.status()[name]
        assert status.live is ds_patches.is_applied(name)
        return heard, status.live, status.reason


@pytest.mark.parametrize("calls", [False, True], ids=["replaced", "wrapped"])
def test_a_replacement_is_named_once_and_a_wrapper_that_calls_ours_is_none(
    world: World, name: str, calls: bool
) -> None:
    """At the class itself: see test_lifecycle."""
    for heard, is_live, reason in world.run(seen, name, calls):
        assert is_live is calls
        if calls:
            assert not heard
        else:
            assert f"{ZERO_GRAD} is replaced by" in reason
            assert "at one DeepSpeedEngine" in reason
            assert sum("is replaced by" in line for line in heard) == 1


def in_a_subclass(name: str, calls: bool) -> tuple[bool, str]:
    """Of an engine whose class has a method of its own, which calls ours or not."""
    import deepspeed

    class Bare(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
        def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
            return None

    class Calling(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
        def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
            return super().zero_grad(*args, **kwargs)

    with applied(name), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(deepspeed, "DeepSpeedEngine", Calling if calls else Bare)
        engine = engine_of(stage=1)
        assert isinstance(engine, Calling if calls else Bare)
        status = ds_patches.status()[name]
        return status.live, status.reason


@pytest.mark.parametrize("calls", [False, True], ids=["replaced", "called"])
def test_a_subclass_that_does_not_call_ours_is_named(world: World, name: str, calls: bool) -> None:
    for is_live, reason in world.run(in_a_subclass, name, calls):
        assert is_live is calls
        assert calls or "in Bare" in reason


def at_an_older_engine(name: str) -> tuple[bool, bool]:
    """It was built, and its method replaced, before the patch was applied."""
    engine = engine_of(stage=1)
    engine.zero_grad = MethodType(lambda self: None, engine)
    ds_patches.apply(name)
    try:
        before = ds_patches.is_applied(name)
        del engine.zero_grad
        return before, ds_patches.is_applied(name)
    finally:
        ds_patches.unapply(name)


def test_engines_from_before_are_looked_at_and_it_may_go_again(world: World, name: str) -> None:
    assert world.run(at_an_older_engine, name) == [(False, True)] * 2


@on_ranks
def test_engines_of_every_class_are_found_and_nothing_that_stands_for_one() -> None:
    """In each call anew."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    with once.call():
        before = {id(engine) for engine in engines.built()}
        kinds = (DeepSpeedEngine, PipelineEngine, type("Own", (PipelineEngine,), {}))
        made = [kind.__new__(kind) for kind in kinds]
        with once.call():
            assert len(engines.built()) == len(before), "one within the other is the same call"
    with once.call():
        assert len(engines.built()) == len(before), "none of them was constructed"
    for engine in made:
        engine.unflatten = None
    proxy = wrapt.ObjectProxy(made[0])
    assert isinstance(proxy, DeepSpeedEngine)
    with once.call():
        found = [id(engine) for engine in engines.built() if id(engine) not in before]
    assert sorted(found) == sorted(map(id, made))


def beside_a_broken_engine() -> list[str]:
    """Its construction raised, and the traceback holds it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    with pytest.raises(AttributeError) as raised:
        DeepSpeedEngine(None, None)
    try:
        return [one.state.value for one in ds_patches.apply_all().values() if not one.live]
    finally:
        ds_patches.unapply_all()
        del raised


def test_an_engine_that_failed_stops_no_patch(world: World) -> None:
    for states in world.run(beside_a_broken_engine):
        assert {*states} <= {"out of range"}


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

    def __init__(self) -> None:
        vars(self)["original"] = ours

    def __call__(self, *args: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("value", "leads"),
    [
        (functools.partial(ours), True),
        (theirs(ours, calls=True), True),
        (theirs(ours, calls=False), False),
        (Functor(ours, None), True),
        (Keeper(), False),
        (functools.lru_cache(ours), True),
        (wrapt.FunctionWrapper(ours, lambda wrapped, _, args, kwargs: wrapped(*args)), True),
        (lambda *args: None, False),
    ],
)
def test_a_call_may_come_to_what_the_code_speaks_of(value: Any, leads: bool) -> None:
    assert live.leads_to(value, ours) is leads
    assert "test_watch.py" in live.origin(value)


def test_an_object_that_answers_to_every_name_has_an_end() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return Anything()

    assert isinstance(live.innermost(Anything()), Anything)
