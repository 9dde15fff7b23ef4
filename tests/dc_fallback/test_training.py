"""Whatever Dynamo skips, the engine trains as plain PyTorch does: patterns, scripts and options.

tests/gpu has the patterns and scripts too.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import EXACT, loop, patched, trains
from tests.dc_fallback.patterns import inputs
from tests.harness import build_engine, compile_engine, half_precision_allowed
from tests.harness.options import OVERLAP, Options, config
from tests.harness.trainers import EngineTrainer, PlainTrainer, engine_trainer, worst_difference
from tests.scripts import deepcompile
from tests.scripts.declared import Script
from tests.world import World, on_ranks

# --- patterns ------------------------------------------------------------------------------------

NAMES = [pattern.__name__ for pattern in patterns.ALL]


@pytest.mark.core_case
@pytest.mark.parametrize(
    "pattern", ["Disabled", "TiedToSkipped", "Shared", "Frozen", "Leaf", "FusedExperts"]
)
def test_nothing_is_compiled(world: World, pattern: str) -> None:
    trains(world, f"skipped {pattern}")


def compiled_once(trainer: Any) -> None:
    """And no call stays open: checkpointing breaks a recomputation off when it has seen enough."""
    graphs = set()
    for step in trainer.steps():
        trainer.backward(trainer(*inputs(step)))
        if trainer.is_engine:
            assert not vars(trainer.engine)["_ds_patches_dc_fallback"].uses.calls
        trainer.step()
        graphs.add(stand_in.native.compiled)
    assert len(graphs) == 1, "something was compiled again"


@pytest.mark.core_case(pattern="Built")
@pytest.mark.core_case(pattern="Mixed")
@pytest.mark.core_case(pattern="TiedGraphs")
@pytest.mark.core_case(pattern="LoopOfBlocks")
@pytest.mark.parametrize("pattern", NAMES)
def test_trains_as_pytorch_does(world: World, pattern: str) -> None:
    trains(world, pattern, compiled_once)


# --- scripts -------------------------------------------------------------------------------------

PATTERNS = ("Compiled", "Mixed", "Whole")
STEPS = 7  # DeepCompile compiles again in the sixth
SCRIPTS = [script for name, script in vars(deepcompile).items() if name.startswith("compiled")]
#: Graphs run no hooks, as on stock.
CASES = [
    (pattern, script)
    for pattern in PATTERNS
    for script in SCRIPTS
    if script is not deepcompile.compiled_parameter_hook or pattern == "Whole"
]


@pytest.mark.parametrize(("pattern", "script"), CASES)
def test_weights_are_those_of_plain_pytorch(world: World, pattern: str, script: Script) -> None:
    own = script is deepcompile.compiled_parameter_hook  # hooks of its own, which stay
    options = {"steps": STEPS, "micro_steps": script.options.micro_steps, "strict": not own}
    trains(world, pattern, script, {"anew": 1}, **options)


def weighed_by_evaluations(trainer: Any, step: int) -> None:
    """A step is larger, the larger the loss of an evaluation before it: no older parameters."""
    trainer.module.eval()
    with torch.no_grad():
        weight = 10 * trainer(*inputs(step, 1))
    trainer.module.train()
    trainer.backward(weight * trainer(*inputs(step, 0)))


def read_after_a_forward(trainer: Any, step: int) -> None:
    """A script has gathered a parameter by itself, and runs the model before it reads it.

    It stays, also if it is small, as those that are let go of when a forward begins.
    """
    bias = trainer.module.layers[0].bias
    with trainer.gathered([bias]):
        loss = trainer(*inputs(step, 0))
        loss = loss * (1 + bias.detach().square().sum())
    trainer.backward(loss)


PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 100}}


def test_parameters_that_others_gather(world: World) -> None:
    trains(world, "Evaluated", weighed_by_evaluations, {"keeps": True})
    trains(world, "Disabled", read_after_a_forward, **PERSISTENT)


# --- options -------------------------------------------------------------------------------------


def forwards_first(trainer: Any, step: int) -> None:
    for loss in [trainer(*inputs(step, part)) for part in range(2)]:
        trainer.backward(loss)


#: DeepCompile keeps parameters gathered until a step, or begins anew in the second one.
KEEPS, ANEW = {"compiles": {"keeps": True}}, {"compiles": {"anew": 1}}
WAYS: dict[str, dict[str, Any]] = {
    "micro steps, torch": {"micro_steps": 2, "style": "torch"},
    "two backwards": {"script": deepcompile.compiled_two_forwards},
    "two backwards, torch": {"script": deepcompile.compiled_two_backwards, "style": "torch"},
    "forwards first": {"script": forwards_first},
    "anew": ANEW,
    "anew, micro steps": {**ANEW, "micro_steps": 2},
    "keeps": KEEPS,
    "keeps, micro steps": {**KEEPS, "micro_steps": 2},
    "keeps, two forwards": {**KEEPS, "script": partial(loop, forwards=2)},
    "keeps, evaluates": {**KEEPS, "script": partial(loop, evaluates=True)},
    "persistent": PERSISTENT,
    "small buckets": {"zero": {"reduce_bucket_size": 100}},
    "offloaded": {"zero": {"offload_param": {"device": "cpu"}}},
    "overlap": OVERLAP,
    "clipped": {"clip": 0.05, "steps": 6},
}


@pytest.mark.core_case(pattern="TiedToSkipped", way="forwards first")
@pytest.mark.core_case(pattern="TiedToSkipped", way="two backwards")
@pytest.mark.core_case(pattern="TiedToSkipped", way="two backwards, torch")  # one epilogue
@pytest.mark.core_case(pattern="TiedToSkipped", way="anew, micro steps")
@pytest.mark.core_case(pattern="TiedToSkipped", way="keeps, evaluates")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", ["Disabled", "Mixed", "TiedToSkipped", "TiedGraphs", "Whole"])
def test_trains(world: World, pattern: str, way: str) -> None:
    trains(world, pattern, **WAYS[way])


@on_ranks
@pytest.mark.parametrize("pattern", ["Disabled", "Whole"])
def test_overflow_skips_the_step(pattern: str) -> None:
    """As eager ZeRO-3 does: plain PyTorch has no name for it."""
    scale = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    options = Options(steps=6, settings={"fp16": scale})
    origin = dict(patterns.build(pattern).named_parameters())
    with half_precision_allowed(), stand_in.deep_compile(), patched():
        eager, ours = (
            EngineTrainer(build(patterns.build(pattern), options.config), options)
            for build in (build_engine, compile_engine)
        )
        eager.train(loop)
        ours.train(loop)
        expected, actual = eager.parameters(), ours.parameters()
    assert eager.engine.skipped_steps == ours.engine.skipped_steps > 0
    assert worst_difference(expected, origin)[0] > 5e-4
    assert worst_difference(actual, expected)[0] <= 2e-4


@on_ranks
def test_two_engines() -> None:
    """An engine under DeepCompile trains while a plain ZeRO-3 engine is used too."""
    plain = PlainTrainer(patterns.build("Mixed"), Options())
    plain.train(loop)
    with stand_in.deep_compile(), patched():
        other = engine_trainer(patterns.build("Mixed"))
        trainer = EngineTrainer(compile_engine(patterns.build("Mixed"), config(3)))
        for step in range(3):
            other.backward(other(*inputs(step, 0)))
            trainer.backward(trainer(*inputs(step, 0)))
            other.step()
            trainer.step()
        for engine in (other, trainer):
            assert worst_difference(engine.parameters(), plain.parameters())[0] <= EXACT
