"""Several engines of one model: what is said of them. What they come to is in `tests/orders`."""

import gc

import pytest
import torch

import ds_patches
from tests.harness import (
    EngineTrainer,
    Options,
    applied,
    build_engine,
    listening,
    models,
    on_ranks,
)
from tests.harness.models import loss_of
from tests.scripts.ordinary import micro_steps as train

#: So large that an older engine, whose hooks still fire, reduces nothing by itself.
LARGE = {"zero": {"reduce_bucket_size": 10**7}}


def another(module: torch.nn.Module, options: Options) -> EngineTrainer:
    return EngineTrainer(build_engine(module, options.config), options, strict=False)


@on_ranks
def test_a_part_that_another_engine_has_frozen_is_not_told() -> None:
    options, module = Options(2, **LARGE), models.build("TwoHeads")
    with applied("accumulation"), listening() as heard:
        first = another(module, options)
        module.embed.requires_grad_(False)
        module.blocks.requires_grad_(False)
        head = another(torch.nn.Sequential(module.embed, torch.nn.Linear(16, 1)), options)
        for step in range(2):
            module.requires_grad_(True)
            first.backward(loss_of(first, step))
            first.step()
            module.embed.requires_grad_(False)
            head.backward(head(torch.arange(6)).square().mean())
            head.step()
    assert not heard


@on_ranks
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_to_go_back_is_told(micro_steps: int) -> None:
    """Each steps from its own copy of the weights, here as on stock."""
    options = Options(1, steps=1, micro_steps=micro_steps, **LARGE)
    module = models.build("TwoHeads")
    with applied("accumulation"), listening() as heard:
        another(module, options)  # which never trains
        train(first := another(module, options))
        train(another(module, options))
        gc.collect()
        assert not heard
        for _ in range(2):
            train(first)
    (warning,) = heard
    assert "another engine has trained since" in warning


@on_ranks
def test_engines_of_one_model_are_told_apart_anew_after_an_unapply() -> None:
    """Also if another patch stays applied meanwhile, which knows the same engines."""
    options = Options(1, steps=1, **LARGE)
    module = models.build("TwoHeads")
    with applied("accumulation", "stream_safety"):
        older, newer = another(module, options), another(module, options)
        for _ in range(2):
            train(newer)
            assert vars(older.engine)["_ds_patches_apart"]
            ds_patches.unapply("accumulation")
            assert "_ds_patches_apart" not in vars(older.engine)
            ds_patches.apply("accumulation")


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("other", ["is never stepped", "is stepped", "is frozen", "is zeroed"])
def test_one_loss_for_two_engines(stage: int, other: str) -> None:
    """Accelerate's backward() steps the engine of the Accelerator alone."""
    with applied("zero3_retain", "accumulation"), listening() as heard:
        trains, second = (another(models.build("TwoHeads"), Options(stage)) for _ in range(2))
        second.module.requires_grad_(other != "is frozen")
        for step in range(6):
            trains.backward(loss_of(trains, step) + loss_of(second, step))
            trains.step()
            if other == "is stepped":
                second.step()
            elif other == "is zeroed":
                second.zero_grad()
    warnings = [text for text in heard if "its step() was never called" in text]
    assert len(warnings) == (other == "is never stepped"), heard
