"""Functions in the place of a wrapped method: the status has them, the log once."""

import functools
from typing import Any

import pytest
import wrapt

import ds_patches
from ds_patches.core import engines, gate, registry
from tests.harness.run import applied
from tests.harness.trainers import engine_of
from tests.listening import listening
from tests.world import on_ranks

ZERO_GRAD = "deepspeed.runtime.engine:DeepSpeedEngine.zero_grad"


@pytest.fixture(scope="module")
def name() -> str:
    """A patch that wraps DeepSpeedEngine.zero_grad."""
    for patch in registry.patches().values():
        wraps_it = any(target.key == ZERO_GRAD for target in patch.targets)
        if wraps_it and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("nothing to replace: no patch wraps DeepSpeedEngine.zero_grad on this release")


def theirs(original: Any, *, says_so: bool) -> Any:
    """Another library's wrapper; the status sees beneath it if it says what it wraps."""

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    return functools.wraps(original)(calling) if says_so else calling


@on_ranks
@pytest.mark.parametrize("says_so", [False, True])
def test_a_wrapper_that_does_not_say_what_it_wraps_is_named_once(name: str, says_so: bool) -> None:
    """A library's function is in a method's place as engines are constructed; all are known."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = engine_of(stage=1)
    with applied(name), listening() as heard, pytest.MonkeyPatch.context() as monkeypatch:
        wrapper = theirs(vars(DeepSpeedEngine)["zero_grad"], says_so=says_so)
        monkeypatch.setattr(DeepSpeedEngine, "zero_grad", wrapper)
        assert before in engines.known
        known = len(engines.known)
        since = {engine_of(stage=1), engine_of(stage=1)}
        assert since <= {*engines.known}
        assert len(engines.known) == len(engines.built()) == known + 2
        status = ds_patches.status()[name]
        assert says_so is status.live is ds_patches.is_applied(name)
        assert f"{ZERO_GRAD} is {'wrapped over' if says_so else 'replaced'} by " in status.reason
        assert "test_watch.py" in status.reason
        named = [line for line in heard if "or wrapped without functools.wraps" in line]
        assert len(named) == (not says_so)
    assert not engines.known


@on_ranks
def test_engines_of_every_class_are_found_and_nothing_that_stands_for_one() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    before = {id(engine) for engine in engines.built()}
    kinds = (DeepSpeedEngine, PipelineEngine, type("Own", (PipelineEngine,), {}))
    made = [kind.__new__(kind) for kind in kinds]
    assert len(engines.built()) == len(before), "none of them was constructed"
    for engine in made:
        engine.unflatten = None
    proxy = wrapt.ObjectProxy(made[0])
    assert isinstance(proxy, DeepSpeedEngine)
    new = [id(engine) for engine in engines.built() if id(engine) not in before]
    assert sorted(new) == sorted(map(id, made))
