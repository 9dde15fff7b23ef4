"""`no_sync()` at ZeRO 2 and 3 is DistributedDataParallel's, as stock's is at ZeRO 1."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.coalesce import cases, micro_steps, releases
from tests.coalesce.micro_steps import OFFLOADED, OVERLAP
from tests.collectives import Collectives
from tests.world import World
from tests.zero3_retain import models, trainers

STAGES = [1, 2, 3]
REFUSING = [2, 3]  # stock
UPSTREAM = {"flush": "upstream"}


def check(world: World, script: cases.Script, *, stage: int, **case: Any) -> None:
    for result in world.run(micro_steps.outcome, script, stage=stage, **case):
        assert result.equal(case.get("dtype", "float32")), result
        assert not result.heard


@pytest.mark.core_case(case={}, stage=3)
@pytest.mark.parametrize(
    ("stage", "case"),
    [  # stock's own, at stage 1, dies with overlap_comm: "has already been reduced"
        *((stage, case) for stage in STAGES for case in ({}, UPSTREAM)),
        *((stage, {"settings": OVERLAP}) for stage in REFUSING),
    ],
    ids=str,
)
def test_the_next_synced_backward_reduces_the_sum(
    world: World, stage: int, case: dict[str, Any]
) -> None:
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, **case)


@pytest.mark.parametrize("stage", STAGES)
def test_as_ddp_does(world: World, stage: int) -> None:
    case = {"reference": micro_steps.DDPTrainer}
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, **case)


SCRIPTS: list[tuple[cases.Script, int]] = [
    (micro_steps.stepping_inside, 2),
    (micro_steps.among_micro_steps, 3),
    (micro_steps.synced_in_between, 1),
    (micro_steps.beside_windows, 1),
    (micro_steps.resting_heads, 1),
    (micro_steps.dropped_by_zero_grad, 1),
]


@pytest.mark.core_case(script=micro_steps.stepping_inside, stage=2, settings={})
@pytest.mark.core_case(script=micro_steps.synced_in_between, stage=2, settings=OFFLOADED)
@pytest.mark.core_case(script=micro_steps.synced_in_between, stage=3, settings={})
@pytest.mark.parametrize(
    ("script", "gas"), [pytest.param(*one, id=one[0].__name__) for one in SCRIPTS]
)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [(1, {}), (2, {}), (3, {}), (2, OFFLOADED), (3, OFFLOADED)],
    ids=["1", "2", "3", "2-offloaded", "3-offloaded"],
)
def test_scripts(
    world: World, stage: int, script: cases.Script, gas: int, settings: dict[str, Any]
) -> None:
    if stage == 1 and script is micro_steps.stepping_inside:
        pytest.skip("stock's own refuses engine.step() inside")
    if stage == 1 and script is micro_steps.among_micro_steps and not releases.TORCH_STYLE:
        pytest.skip("stock's own leaves out the division by gradient_accumulation_steps")
    model = "Uneven" if script is micro_steps.resting_heads else "TwoHeads"
    check(world, script, stage=stage, model=model, settings=settings, micro_steps=gas)


@pytest.mark.parametrize("script", [micro_steps.synced_in_between, micro_steps.resting_heads])
@pytest.mark.parametrize("stage", [1, 2])
def test_scripts_with_upstreams_flush(world: World, stage: int, script: cases.Script) -> None:
    model = "Uneven" if script is micro_steps.resting_heads else "TwoHeads"
    check(world, script, stage=stage, model=model, **UPSTREAM)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_have_unlike_numbers_of_backwards(world: World, stage: int) -> None:
    """Not at stage 3, where a forward is a collective."""
    check(world, micro_steps.unlike_numbers, stage=stage)


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("accumulate_in", [None, "fp32"], ids=["low", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(
    world: World, stage: int, accumulate_in: str | None, settings: dict[str, Any]
) -> None:
    config: dict[str, Any] = {**settings, "bf16": {"enabled": True}}
    if accumulate_in:
        config["data_types"] = {"grad_accum_dtype": accumulate_in}
    if stage == 1 and accumulate_in and not settings:
        pytest.skip("bf16 with fp32 gradients at stage 1 is BF16_Optimizer, which is not covered")
    for script in (micro_steps.all_but_the_last_unsynced, micro_steps.synced_in_between):
        check(world, script, stage=stage, dtype="bfloat16", settings=config)


@pytest.mark.parametrize("stage", STAGES)
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    script = micro_steps.all_but_the_last_unsynced
    check(world, script, stage=stage, dtype="float16", settings=config)


@pytest.mark.parametrize("model", ["FrozenTrunk", "SharedBlock", "Reentrant", "LeafModule"])
@pytest.mark.parametrize("stage", STAGES)
def test_models(world: World, stage: int, model: str) -> None:
    check(world, micro_steps.all_but_the_last_unsynced, stage=stage, model=model)


@pytest.mark.parametrize(
    ("stage", "script", "style"),
    [  # every pair of values
        (1, micro_steps.all_but_the_last_unsynced, "scale"),
        (1, micro_steps.synced_in_between, "torch"),
        (2, micro_steps.all_but_the_last_unsynced, "torch"),
        (2, micro_steps.synced_in_between, "scale"),
        (3, micro_steps.all_but_the_last_unsynced, "scale"),
        (3, micro_steps.synced_in_between, "torch"),
    ],
)
def test_torch_style(world: World, stage: int, script: cases.Script, style: str) -> None:
    releases.needs_torch_style(style)
    check(world, script, stage=stage, style=style)


@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_over_one_forward_with_zero3_retain(
    world: World, stage: int, settings: dict[str, Any]
) -> None:
    case = {"others": ("zero3_retain",), "settings": settings}
    check(world, micro_steps.over_one_forward, stage=stage, **case)


# --- Sent, and held ------------------------------------------------------------------------------


def sent_in_three_steps(stage: int, backwards: int, script: cases.Script, gas: int) -> Any:
    """Reductions."""
    with cases.patched():
        start = models.build(models.TwoHeads)
        settings = trainers.config(stage, micro_steps=gas)
        trainer = micro_steps.EngineTrainer(trainers.build_engine(start, settings))
        with Collectives() as sent:
            script(trainer, backwards)
        return {name: n for name, n in sent.seen.items() if "reduce" in name}


@pytest.mark.core_case(stage=2, script=micro_steps.all_but_the_last_unsynced)
@pytest.mark.parametrize(
    ("stage", "script"),
    [
        *((stage, micro_steps.all_but_the_last_unsynced) for stage in STAGES),
        *((stage, micro_steps.stepping_inside) for stage in REFUSING),
    ],
)
def test_a_step_costs_one_reduction(world: World, stage: int, script: cases.Script) -> None:
    found = []
    for backwards in (2, 8):
        gas = backwards if script is micro_steps.stepping_inside else 1
        found += world.run(sent_in_three_steps, stage, backwards, script, gas)
    assert all(sent == found[0] for sent in found)
    assert sum(found[0].values()) > 0


class Watching(trainers.EngineTrainer):
    """What each backward sends, and which gradients it leaves on their parameters."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.seen: list[tuple[dict[str, int], list[str]]] = []

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        with Collectives() as sent:
            super().backward(loss, retain_graph)
        parameters = self.engine.module.named_parameters()
        left = [name for name, param in parameters if param.grad is not None]
        self.seen.append((dict(sent.seen), left))


def seen_in_micro_steps(stage: int, patch: bool) -> Any:
    with cases.patched() if patch else nullcontext():
        settings = trainers.config(stage, micro_steps=3)
        trainer = Watching(trainers.build_engine(models.build(models.TwoHeads), settings))
        micro_steps.micro_steps(trainer, 3)
        return trainer.seen


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", REFUSING)
def test_micro_steps_without_it_are_stocks(world: World, stage: int) -> None:
    """Each is reduced at once, and no gradient stays on its parameter."""
    for stock, ours in zip(
        world.run(seen_in_micro_steps, stage, patch=False),
        world.run(seen_in_micro_steps, stage, patch=True),
        strict=True,
    ):
        assert ours == stock
        for sent, left in ours:
            assert any("reduce" in name for name in sent)
            assert not left
