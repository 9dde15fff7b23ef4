"""Who is named, who is not, and that all ranks say the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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


def cut_off(engine: Any) -> None:
    engine.module.how = "cut off"


def named(
    model: str, stage: int, *names: str, core: bool = False, note: str = "", **more: Any
) -> Any:
    """A case: a model, options of `check`, and the parameters that are named with a note."""
    label = f"{model}-{stage}-{' '.join(map(str, more))}"
    marks = [pytest.mark.core_case] * core
    return pytest.param(model, stage, more, dict.fromkeys(names, note), id=label, marks=marks)


CASES = [
    # What trains passes in silence.
    *(
        named(model, stage, core=model == "TwoHeads" and not more, **more)
        for more in ({}, {"patches": True})
        for model in ("TwoHeads", "TiedEmbedding", "FrozenTrunk", "Reentrant", *PASS)
        for stage in STAGES
    ),
    # What runs without a gradient is named on every rank. At 3 all ranks gather, and so run.
    *(named("cut off", stage, *CUT, core=True) for stage in STAGES),
    *(named("zeroed", stage, *CUT) for stage in STAGES),
    *(named("runs on one rank", stage, *CUT) for stage in STAGES[:3]),
    # A container runs with the module above; a late gradient has its time.
    named("HeldByAList", 2, "scales.1", core=True, before=0),
    named("LowRank", 2, "first.weight", core=True, before=0),
    named("LowRank", 2, core=True, before=0, steps=2),
    # Stage 3 and offload step again with what was there; that does not make it a new gradient. Nor
    # does clipping, which changes it in each step.
    *(
        named("trains", stage, *CUT, core=(stage == 3 and "clip" in more),
              note=OLD if stage == 3 or more else "", steps=2, change=cut_off, **more)
        for stage in (1, 2, 3)
        for more in ({}, OFFLOADED, OFFLOADED | CLIPPED)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "stage", "more", "untrained"), CASES)
def test_what_does_not_train_is_named_on_every_rank(
    world: World, model: str, stage: int, more: dict[str, Any], untrained: dict[str, str]
) -> None:
    found = check(world, model, stage, **more)
    assert found.untrained == untrained
    assert found.error.startswith(f"NotTrained: {len(untrained)} of " if untrained else "")
    assert bool(found.error) == bool(untrained)
    assert all(f"\n  {name} (" in found.error for name in untrained)
    assert (found.steps, found.idle, found.warnings) == (more.get("steps", 1), {}, [])


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_branch_is_reported_and_no_error(world: World, stage: int) -> None:
    found = check(world, "unused", stage)
    assert found.idle == dict.fromkeys(CUT, "")
    assert not found.error
    assert not found.untrained
    (warning,) = found.warnings
    assert "their modules were not seen to run:\n  cut.weight (Linear)\n" in warning


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


def at_rate_0(engine: Any, micro_steps: int = 1) -> None:
    """Take a step that changes no weight, so that the next gradient is the same."""
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    checked.step(engine, micro_steps=micro_steps)


def begin(engine: Any) -> None:
    at_rate_0(engine, micro_steps=2)
    checked.step(engine)


#: Models and options of `check`, in which a gradient is that of the step before.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("constant", {"steps": 2, "patches": True}),
    "the same batch at a rate of 0":
        ("TwoHeads", {"before": 0, "change": at_rate_0, "block": checked.step}),
    # What the rest of the accumulation does not use got its gradient before the block.
    "begun outside": ("TwoHeads", {"before": 0, "micro_steps": 2, "change": begin,
                                   "block": partial(checked.step, only=slice(1))}),
}  # fmt: skip


@pytest.mark.core_case(stage=3)
@pytest.mark.parametrize("how", SAME)
@pytest.mark.parametrize(("stage", "more"), LAYOUTS)
def test_the_same_gradient_again_is_a_new_one(
    world: World, stage: int, more: dict[str, Any], how: str
) -> None:
    model, options = SAME[how]
    assert check(world, model, stage, **options, **more) == Verdict(steps=options.get("steps", 1))


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
