"""Parameters frozen or unfrozen after ``initialize``: one warning says what becomes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import EngineTrainer, applied, build_engine, listening, models, parameters
from tests.harness.models import loss_of
from tests.harness.options import BF16, BF16_SUMS, OFFLOADED, Options
from tests.harness.stock import up_to
from tests.world import on_ranks

EVERYWHERE = pytest.mark.parametrize(
    "options",
    [Options(0, **BF16), Options(1), Options(1, **BF16_SUMS), Options(2, **OFFLOADED), Options(3)],
)


def told(
    options: Options,
    between: Callable[[nn.Module, int], None],
    before: Callable[[nn.Module], None] = lambda head: None,
    lr: float = 0.1,
    **settings: Any,
) -> tuple[list[str], bool]:
    """Return the warnings of four steps, a head changed before each, and whether the last moved it.

    before: what is done with the head before the engine is built.
    """
    with applied("weights_by_hand", "half_without_zero", "accumulation"), listening() as heard:
        model = models.build("TwoHeads", options.torch_dtype)
        before(model.rebuild)
        kind = torch.optim.AdamW if "betas" in settings else torch.optim.SGD
        head = [*model.rebuild.parameters()]
        rest = [param for param in model.parameters() if all(param is not own for own in head)]
        # A group that is frozen as a whole is an error of DeepSpeed's.
        groups = [rest + head] if lr else [rest, head]
        param_groups = [
            {"params": group, "lr": rate} for group, rate in zip(groups, (0.1, lr), strict=False)
        ]
        engine = build_engine(model, options.config, optimizer=kind(param_groups, **settings))
        trainer = EngineTrainer(engine, options, strict=False)
        for step in range(4):
            between(model.rebuild, step)
            start = parameters(model.rebuild)
            trainer.backward(loss_of(trainer, step))
            trainer.step()
        moved = any(
            not torch.equal(start[name], end) for name, end in parameters(model.rebuild).items()
        )
        return heard, moved


def frozen(head: nn.Module, step: int = 2) -> None:
    head.requires_grad_(step < 2)


def unfrozen(head: nn.Module, step: int) -> None:
    head.requires_grad_(step >= 2)


def says(heard: list[str], *words: str) -> bool:
    return dist.get_rank() > 0 or (len(heard) == 1 and all(word in heard[0] for word in words))


@on_ranks
@pytest.mark.core_case
@EVERYWHERE
def test_unfrozen(options: Options) -> None:
    heard, moved = told(options, unfrozen, frozen)
    if moved:  # to 0.18 without ZeRO
        assert not heard
    else:
        assert says(heard, "rebuild.weight, rebuild.bias", "Call initialize again"), heard


@on_ranks
@EVERYWHERE
def test_frozen(options: Options) -> None:
    heard, moved = told(options, frozen, betas=(0.9, 0.99))
    assert moved, "stock does not move it: say nothing"
    assert says(heard, "rebuild.weight, rebuild.bias", "learning rate of their group to 0"), heard


@on_ranks
@EVERYWHERE
@pytest.mark.parametrize("settings", [{}, {"betas": (0.9, 0.99), "lr": 0.0}], ids=["sgd", "lr0"])
def test_what_stays_where_it_is(options: Options, settings: dict[str, Any]) -> None:
    heard, moved = told(options, frozen, **settings)
    assert not moved
    assert not heard


def meanwhile(head: nn.Module, step: int) -> None:
    """As a GAN does, in the step of the other network."""
    head.requires_grad_(False)
    head.requires_grad_(True)


@on_ranks
@EVERYWHERE
def test_between_steps(options: Options) -> None:
    heard, moved = told(options, meanwhile, betas=(0.9, 0.99))
    assert moved
    assert not heard


@on_ranks
def test_without_copies_it_is_as_in_pytorch() -> None:
    heard, moved = told(Options(0), unfrozen, frozen)
    assert moved
    assert not heard


@up_to("0.19.5")
@on_ranks
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_of_no_elements_was_frozen_by_nobody(stage: int) -> None:
    """But by the patch without which DeepSpeed raises."""
    with applied("weights_by_hand", "zero12_gradients", "accumulation"), listening() as heard:
        model = models.build("TwoHeads")
        model.none = nn.Parameter(torch.empty(0))
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = EngineTrainer(
            build_engine(model, Options(stage).config, optimizer=optimizer),
            Options(stage),
            strict=False,
        )
        for step in range(2):
            trainer.backward(loss_of(trainer, step))
            trainer.step()
    assert not heard
