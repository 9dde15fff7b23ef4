"""Ordinary scripts with nothing skipped, with some frames, and with all; tests/gpu has them too."""

from __future__ import annotations

import pytest

from tests.dc_fallback.loops import run, trains
from tests.scripts import deepcompile
from tests.scripts.declared import Script
from tests.world import World

PATTERNS = ("Compiled", "Mixed", "Whole")
STEPS = 7  # DeepCompile compiles again in the sixth
SCRIPTS = (
    deepcompile.compiled,
    deepcompile.compiled_bad_batch,
    deepcompile.compiled_abandoned_forward,
    deepcompile.compiled_two_backwards,
    deepcompile.compiled_two_forwards,
    deepcompile.compiled_parameter_hook,
    deepcompile.compiled_inference_mode,
    deepcompile.compiled_zeroed_at_the_top,
    deepcompile.compiled_abandoned_in_the_middle,
)
#: Graphs run no hooks, as on stock.
CASES = [
    (pattern, script)
    for pattern in PATTERNS
    for script in SCRIPTS
    if script is not deepcompile.compiled_parameter_hook or pattern == "Whole"
]


@pytest.mark.parametrize(("pattern", "script"), CASES)
def test_weights_are_those_of_plain_pytorch(world: World, pattern: str, script: Script) -> None:
    micro_steps = script.options.micro_steps
    own = script is deepcompile.compiled_parameter_hook  # hooks of its own, which stay
    given = {"steps": STEPS, "micro_steps": micro_steps, "strict": not own}
    trains(world, pattern, script, {"anew": 1}, **given)


def test_a_hook_that_no_graph_runs_is_named(world: World) -> None:
    hooked = deepcompile.compiled_parameter_hook
    for outcome in world.run(run, "Compiled", hooked, steps=STEPS):
        said = " ".join(outcome.said)
        assert "A hook of parameter layers.0.weight is not run" in said, said
