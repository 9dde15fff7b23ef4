"""Who is named, who is not, and that all ranks say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.diagnostics.traincheck import checked
from tests.diagnostics.traincheck.checked import Verdict
from tests.harness import models
from tests.harness.options import BF16, OFFLOADED
from tests.world import World

STAGES = [0, 1, 2, 3]
CUT = ["cut.weight", "cut.bias"]
LEFT = "its gradient stayed on the parameter and was not reduced"
CLIPPED = {"clip": 1e-3}
OLD = "stepped with the gradient of an earlier step"


def agreed(ranks: list[Verdict]) -> Verdict:
    """What all ranks say; only the first warns."""
    first, other = ranks
    assert other == replace(first, warnings=[])
    return first


def check(world: World, model: str, stage: int, **more: Any) -> Verdict:
    return agreed(world.run(checked.check, model, stage, **more))


PASS = ["frozen", "never called", "trains on one rank"]


@pytest.mark.core_case(patches=False, model="TwoHeads")
@pytest.mark.parametrize("patches", [False, True], ids=["", "patched"])
@pytest.mark.parametrize("model", ["TwoHeads", "TiedEmbedding", "FrozenTrunk", "Reentrant", *PASS])
@pytest.mark.parametrize("stage", STAGES)
def test_what_trains_passes_in_silence(world: World, stage: int, model: str, patches: bool) -> None:
    assert check(world, model, stage, patches=patches) == Verdict(steps=1)


@pytest.mark.core_case(model="cut off")
@pytest.mark.parametrize("model", ["cut off", "zeroed", "runs on one rank"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_runs_without_a_gradient_is_named_on_every_rank(
    world: World, stage: int, model: str
) -> None:
    if stage == 3 and model == "runs on one rank":
        pytest.skip("at 3 all ranks gather, and so run")
    found = check(world, model, stage)
    assert list(found.untrained) == CUT
    assert found.error.startswith("NotTrained: 2 of ")
    assert all(f"\n  {name} (Linear)" in found.error for name in CUT)
    assert not found.idle
    assert not found.warnings


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_branch_is_reported_and_no_error(world: World, stage: int) -> None:
    found = check(world, "unused", stage)
    assert found.idle == dict.fromkeys(CUT, "")
    assert not found.error
    assert not found.untrained
    (warning,) = found.warnings
    assert "their modules were not seen to run:\n  cut.weight (Linear)\n" in warning


@pytest.mark.core_case
@pytest.mark.parametrize(
    ("model", "steps", "untrained"),
    [
        ("HeldByAList", 1, ["scales.1"]),  # a container runs with the module above
        ("LowRank", 1, ["first.weight"]),
        ("LowRank", 2, []),  # a late gradient has its time
    ],
)
def test_what_a_module_is_like(world: World, model: str, steps: int, untrained: list[str]) -> None:
    found = check(world, model, 2, before=0, steps=steps)
    assert found.untrained == dict.fromkeys(untrained, "")
    assert all(f"{name} (" in found.error for name in untrained)
    assert (found.steps, bool(found.error)) == (steps, bool(untrained))
    assert not found.idle
    assert not found.warnings


def lose(engine: Any) -> None:
    """Take the hooks away that reduce gradients at stage 3, as DeepCompile does."""
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    zero_grad = engine.optimizer.zero_grad

    def clear(*args: Any, **kwargs: Any) -> None:
        for param in engine.module.parameters():
            param.grad = None  # stock notes streams on it first, which a CPU has not
        zero_grad(*args, **kwargs)

    engine.optimizer.zero_grad = clear


@pytest.mark.core_case(before=1)
@pytest.mark.parametrize(
    ("model", "before"), [("TwoHeads", 0), ("TwoHeads", 1), ("never called", 0)]
)
def test_every_parameter_whose_gradient_is_not_reduced_is_named(
    world: World, model: str, before: int
) -> None:
    """What DeepCompile's start leaves of an engine: gradients are computed, and stay behind."""
    found = check(world, model, 3, before=before, change=lose)
    named = models.build(checked.model_of(model)).named_parameters()
    assert list(found.untrained) == [name for name, _ in named]
    assert not found.idle
    assert set(found.untrained.values()) == {", ".join([LEFT, *[OLD] * before])}


LAYOUTS = [*((stage, {}) for stage in STAGES), *((stage, OFFLOADED) for stage in (1, 2, 3))]


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize("how", ["constant", "the same batch at a rate of 0", "begun outside"])
@pytest.mark.parametrize(("stage", "more"), LAYOUTS)
def test_the_same_gradient_again_is_a_new_one(
    world: World, stage: int, more: dict[str, Any], how: str
) -> None:
    found = agreed(world.run(repeated, stage, how, **more))
    assert found == Verdict(steps=2 if how == "constant" else 1)


def repeated(stage: int, how: str, **more: Any) -> Verdict:
    if how == "constant":
        return checked.check(how, stage, steps=2, patches=True, **more)
    micro_steps = 1 + (how == "begun outside")
    engine = checked.engine_of("TwoHeads", stage, micro_steps=micro_steps, **more)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    checked.step(engine, micro_steps=micro_steps)
    if how == "begun outside":
        checked.step(engine)
        # What the rest of the accumulation does not use got its gradient before the block.
        return checked.verdict_of(engine, lambda: checked.step(engine, only=slice(1)))
    return checked.verdict_of(engine, lambda: checked.step(engine))


def cut_off(engine: Any) -> None:
    engine.module.how = "cut off"


@pytest.mark.core_case(stage=3, more=OFFLOADED | CLIPPED)
@pytest.mark.parametrize(
    "more", [{}, OFFLOADED, OFFLOADED | CLIPPED], ids=["", "offload", "clipped"]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_of_an_earlier_step_is_none(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    """Stage 3 and offload step again with what was there; that does not make it a new gradient.

    Nor does clipping, which changes it in each step.
    """
    case = {"steps": 2, "change": cut_off, **more}
    found = check(world, "trains", stage, **case)
    assert found.untrained == dict.fromkeys(CUT, OLD if stage == 3 or more else "")


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        *((stage, {"steps": 2, "micro_steps": 2}) for stage in STAGES),
        (1, BF16),
        (3, BF16),
        (2, {"zero": {"round_robin_gradients": True}}),
        (2, CLIPPED),
        (3, {**CLIPPED, "zero": {"sub_group_size": 300}}),
        (2, OFFLOADED),
        (3, OFFLOADED),
    ],
)
def test_other_layouts_and_micro_steps(world: World, stage: int, more: dict[str, Any]) -> None:
    assert check(world, "TwoHeads", stage, **more) == Verdict(steps=more.get("steps", 1))
    assert list(check(world, "cut off", stage, **more).untrained) == CUT
