"""A resumed training goes on as one that was not interrupted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_patches
from ds_patches.core.errors import Refused
from tests.cures.half_without_zero.test_half import EITHER, PATCH, RISING
from tests.harness import EngineTrainer, applied, check, engine_trainer, half_precision_allowed
from tests.harness.models import loss_of
from tests.harness.options import ADAM, BF16, BF16_SUMS, FP16, Given, Options
from tests.harness.stock import RELEASE, Version
from tests.world import World, on_ranks

#: Stock takes an optimizer of bf16 for one of ZeRO's.
LOSES_STATE = Version("0.17.6") <= RELEASE <= Version("0.18.4")


def train(trainer: EngineTrainer, steps: range) -> None:
    for step in steps:
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@on_ranks
@pytest.mark.core_case(options={"stage": 0, **ADAM, **BF16})
@pytest.mark.core_case(options={"stage": 1, **ADAM, **BF16_SUMS})
@pytest.mark.parametrize(
    "options",
    [
        *({"stage": 0, **ADAM, **half} for half in (BF16, FP16)),
        *({"stage": 0, "fused": True, **half} for half in (BF16, FP16)),
        {"stage": 1, **ADAM, **BF16_SUMS},
    ],
    ids=str,
)
def test_it_goes_on(tmp_path: Path, options: Given) -> None:
    with half_precision_allowed(), applied(PATCH):
        first, second = (engine_trainer(folder=tmp_path, **options) for _ in range(2))
        train(first, range(3))
        first.save()
        train(first, range(3, 6))
        second.load()
        train(second, range(3, 6))
    assert second.engine.global_steps == 6
    for param, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(param, other)


@on_ranks
@pytest.mark.core_case(only_module=False)
@pytest.mark.skipif(not LOSES_STATE, reason="stock saves it")
@pytest.mark.parametrize("only_module", [False, True])
def test_what_stock_has_saved(tmp_path: Path, only_module: bool) -> None:
    options = {"stage": 0, **ADAM, **BF16}
    first, second = (engine_trainer(folder=tmp_path, **options) for _ in range(2))
    with applied(PATCH):
        train(first, range(3))
    first.save()
    with applied(PATCH):
        load = partial(second.engine.load_checkpoint, str(tmp_path), tag="here")
        if not only_module:
            with pytest.raises(Refused, match="load_module_only=True"):
                load()
            return
        load(load_module_only=True)
        masters = second.engine.optimizer.fp32_groups[0]
    for param, other in zip(first.module.parameters(), masters, strict=True):
        assert torch.equal(param.float(), other)


def resumed(trainer: Any, step: int, folder: Path, stock_saves: bool) -> None:
    """Half way it goes on in another engine."""
    if trainer.is_engine and step == 2:
        trainer.folder = folder
        if stock_saves:
            ds_patches.unapply_all()
        trainer.save()
        ds_patches.unapply_all()
        trainer.engine = trainer.another().engine
        if stock_saves:
            ds_patches.apply(PATCH)
        trainer.load()
        ds_patches.apply(PATCH)
    trainer.backward(loss_of(trainer, step))


@pytest.mark.parametrize("stock_saves", [False, True])
@pytest.mark.parametrize("fused", EITHER)
def test_it_goes_on_in_fp16(world: World, tmp_path: Path, fused: Given, stock_saves: bool) -> None:
    script = partial(resumed, folder=tmp_path, stock_saves=stock_saves)
    options = Options(0, steps=4, rates=(0.2,), **FP16 | RISING | fused)
    check(world, script, options, PATCH, quiet=False)
