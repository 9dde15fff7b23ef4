"""C8: ZeRO-2 of 0.17.6 to 0.18.2 keeps the last micro step only; patched, it adds them up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coalesce import cases, micro_steps, releases
from tests.coalesce.micro_steps import OVERLAP
from tests.world import World

defective = pytest.mark.skipif(
    not releases.LOSES_MICRO_STEPS, reason="only 0.17.6 to 0.18.2 lose micro steps"
)
SCRIPTS = [(micro_steps.micro_steps, 3), (micro_steps.by_hand, 1)]
SEVERAL = [
    micro_steps.twice_at_the_boundary,
    micro_steps.by_hand_and_on,
    micro_steps.both_over_one_forward,
]
scripts = pytest.mark.parametrize(
    ("script", "gas"), [pytest.param(*one, id=one[0].__name__) for one in SCRIPTS]
)


def ends(world: World, script: cases.Script, stage: int, **case: Any) -> list[cases.Outcome]:
    case = {"no_sync": "off", **case}
    return list(world.run(micro_steps.outcome, script, stage=stage, **case))


@defective
@pytest.mark.core_case
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "upstream"])
@scripts
def test_stock_keeps_the_last_only(
    world: World, script: cases.Script, gas: int, patch: bool
) -> None:
    case = {"patch": patch, "choices": {"micro_steps": "upstream"}}
    for result in ends(world, script, 2, micro_steps=gas, **case):
        assert not result.error
        assert result.difference > 1e-2


@pytest.mark.core_case(settings={}, stage=2)
@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["", "overlap"])
@pytest.mark.parametrize("stage", [1, 2])
@scripts
def test_micro_steps_add_up(
    world: World, stage: int, script: cases.Script, gas: int, settings: dict[str, Any]
) -> None:
    for result in ends(world, script, stage, micro_steps=gas, settings=settings):
        assert result.equal(), result
        assert not result.heard


@defective
@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("script", SEVERAL[:1])
def test_stock_fails_with_a_second_backward_at_the_boundary(
    world: World, script: cases.Script, stage: int
) -> None:
    for result in ends(world, script, stage, patch=False):
        assert "NoneType" in result.error


@defective
@pytest.mark.core_case  # all of them: they run on no other release
@pytest.mark.parametrize("others", [(), ("zero3_retain",)], ids=["", "zero3_retain"])
@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["", "overlap"])
@pytest.mark.parametrize("script", SEVERAL)
@pytest.mark.parametrize("stage", [1, 2])
def test_several_backwards_at_the_boundary_add_up(
    world: World,
    stage: int,
    script: cases.Script,
    settings: dict[str, Any],
    others: tuple[str, ...],
) -> None:
    for result in ends(world, script, stage, settings=settings, others=others):
        assert result.equal(), result
        assert not result.heard
