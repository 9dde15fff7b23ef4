"""PEFT's LoRA at ZeRO-3, recomputed as the Trainer has it, against plain PyTorch."""

from __future__ import annotations

import pytest

from tests.training import stock
from tests.training.options import Options
from tests.training.run import check, run
from tests.world import World

pytest.importorskip("peft", reason="peft is not installed: it is in the extra `frameworks`")

from tests.frameworks.user import lora, under_init

pytestmark = pytest.mark.exhaustive
PATCHES = ("zero3_retain", "zero3_hooks")
MODELS = [
    lora.Lora,
    lora.WithoutInputs,
    lora.Reentrant,
    lora.Saving,
    lora.SavingWithoutInputs,
    lora.SavingReentrant,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("train", [lora.train, lora.train_and_generate])
def test_it_trains_as_plain_pytorch_does(world: World, model: type, train: object) -> None:
    check(world, train, Options(model=model), *PATCHES)  # type: ignore[arg-type]


def test_stock_loses_frozen_parameters(world: World) -> None:
    for one in world.run(run, lora.train, Options(model=lora.Lora)):  # type: ignore[arg-type]
        assert ("Recomputed values for" in one.error) == stock.LOSES_FROZEN, one


def test_adapters_of_another_dtype_than_the_base(world: World) -> None:
    """Stock 0.19.2 gathers all persistent parameters as if they had the first one's."""
    for error, _, _ in world.run(under_init.train, ()):
        assert bool(error) == (stock.Version("0.19.2") == stock.RELEASE), error
    for error, difference, moved in world.run(under_init.train, PATCHES):
        assert not error
        assert difference < 0.05 * moved
