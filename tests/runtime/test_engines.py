"""Which engines there are."""

from __future__ import annotations

import wrapt
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_patches.core import once
from ds_patches.runtime import engines


class Own(PipelineEngine):  # type: ignore[misc]
    """A subclass of a subclass, of the user's."""


def test_engines_of_every_class_are_found_and_nothing_that_stands_for_one() -> None:
    before = {id(engine) for engine in engines.built()}
    made = [kind.__new__(kind) for kind in (DeepSpeedEngine, PipelineEngine, Own)]
    proxy = wrapt.ObjectProxy(made[0])
    assert isinstance(proxy, DeepSpeedEngine)
    found = [engine for engine in engines.built() if id(engine) not in before]
    assert {id(engine) for engine in found} == {id(engine) for engine in made}
    assert len(found) == len(made)


def test_the_next_call_looks_again() -> None:
    with once.call():
        before = len(engines.built())
        engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
        with once.call():
            assert len(engines.built()) == before, "one within the other is the same call"
    with once.call():
        assert any(one is engine for one in engines.built())
