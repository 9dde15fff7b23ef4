"""The scripts, by the stand-in; tests/gpu has them with DeepCompile itself."""

from __future__ import annotations

import pytest

from tests.dc_fallback import cases, scripts
from tests.dc_fallback.test_patterns import assert_trained
from tests.world import World


def outcome(world: World, pattern: str, name: str) -> cases.Outcome:
    script, micro_steps = scripts.ALL[name]
    found = world.run(cases.run, pattern, script, micro_steps=micro_steps, anew=True)
    first: cases.Outcome = found[0]
    return first


@pytest.mark.sampled(ways=2)
@pytest.mark.parametrize(("pattern", "name"), scripts.CASES)
def test_weights_are_those_of_plain_pytorch(world: World, pattern: str, name: str) -> None:
    assert_trained(outcome(world, pattern, name))


def test_a_hook_that_no_graph_runs_is_named(world: World) -> None:
    heard = outcome(world, "Compiled", "hooked").heard
    assert any("A hook of parameter layers.0.weight is not run" in one for one in heard), heard
