"""Whatever Dynamo skips, the engine trains as plain PyTorch does: each pattern, and scripts.

Scripts run with nothing skipped, with some frames, and with all; tests/gpu has them too.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import run, trains
from tests.scripts import deepcompile
from tests.scripts.declared import Script
from tests.world import World

NAMES = [
    # The import of transformers takes longer than all other patterns.
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "QwenMoe" else name
    for name in (pattern.__name__ for pattern in patterns.ALL)
]


@pytest.mark.core_case
@pytest.mark.parametrize(
    "pattern", ["Disabled", "TiedToSkipped", "Shared", "Frozen", "Leaf", "FusedExperts"]
)
def test_nothing_is_compiled(world: World, pattern: str) -> None:
    trains(world, f"skipped {pattern}")


def compiled_once(trainer: Any) -> None:
    graphs = set()
    for step in trainer.steps():
        trainer.backward(trainer(*patterns.inputs(step)))
        trainer.step()
        graphs.add(stand_in.native.compiled)
    assert len(graphs) == 1, "something was compiled again"


@pytest.mark.core_case(pattern="Mixed")
@pytest.mark.core_case(pattern="TiedGraphs")
@pytest.mark.core_case(pattern="LoopOfBlocks")
@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_pytorch_does(world: World, pattern: str) -> None:
    trains(world, pattern, compiled_once)


# --- scripts -------------------------------------------------------------------------------------

PATTERNS = ("Compiled", "Mixed", "Whole")
STEPS = 7  # DeepCompile compiles again in the sixth
SCRIPTS = [one for name, one in vars(deepcompile).items() if name.startswith("compiled")]
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
