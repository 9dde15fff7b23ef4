"""A mixture of experts of transformers, whose ranks use different ones."""

from __future__ import annotations

import pytest

from tests.training.options import Options
from tests.training.run import check
from tests.world import RankError, World

pytest.importorskip("peft", reason="peft is not installed: it is in the extra `frameworks`")
pytest.importorskip("transformers", reason="transformers is not installed: `frameworks` has it")

from tests.frameworks.user import lora, switch

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_it_trains_as_plain_pytorch_does(world: World, stage: int, micro_steps: int) -> None:
    options = Options(stage, model=switch.Switch, micro_steps=micro_steps, steps=4)  # type: ignore[arg-type]
    check(world, lora.train, options, "accumulation")


@pytest.mark.parametrize("stage", [1, 2])
def test_stock_adds_up_gradients_of_different_experts(fresh_world: World, stage: int) -> None:
    """Where they are of different sizes, gloo ends a rank."""
    with pytest.raises((RankError, AssertionError)):
        check(fresh_world, lora.train, Options(stage, model=switch.Switch))  # type: ignore[arg-type]
