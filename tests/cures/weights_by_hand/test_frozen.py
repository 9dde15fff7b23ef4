"""Parameters of which a step does not make what PyTorch's would: one warning says so."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import EngineTrainer, applied, build_engine, listening, models, parameters
from tests.harness.models import loss_of
from tests.harness.options import BF16, BF16_SUMS, OFFLOADED, Given, Options
from tests.world import on_ranks

PATCHES = "weights_by_hand", "half_without_zero", "accumulation", "zero12_gradients"
ADAM: Given = {"lr": 0.1, "betas": (0.9, 0.99)}
#: What stock raises for an optimizer that does not fit, by release and stage.
ERRORS = (IndexError, AssertionError, ValueError, RuntimeError, AttributeError)

Change = Callable[[nn.Module, int], None]


def frozen(head: nn.Module, step: int) -> None:
    head.requires_grad_(step < 2)


def unfrozen(head: nn.Module, step: int) -> None:
    head.requires_grad_(step >= 2)


def meanwhile(head: nn.Module, step: int) -> None:
    """As a GAN does, in the step of the other network."""
    head.requires_grad_(False)
    head.requires_grad_(True)


@on_ranks
@pytest.mark.core_case(change=unfrozen)
@pytest.mark.core_case(change=meanwhile)
@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (unfrozen, {"lr": 0.1}, "Call initialize again after unfreezing"),
        (frozen, ADAM, "learning rate of their group to 0"),
        (frozen, {"lr": 0.1}, ""),
        (frozen, ADAM | {"lr": 0.0}, ""),
        (meanwhile, ADAM, ""),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        *(Options(0), Options(0, **BF16), Options(1), Options(1, **BF16_SUMS)),
        *(Options(2, **OFFLOADED), Options(3)),
    ],
)
def test_frozen_after_initialize(
    options: Options, change: Change, settings: Given, words: str
) -> None:
    """A warning if the last step moved a head that was frozen, or did not move one that was not.

    Not a parameter of no elements, which zero12_gradients freezes.
    """
    with applied(*PATCHES), listening() as heard:
        model = models.build("TwoHeads", options.torch_dtype)
        change(head := model.rebuild, 0)
        if options.stage in (1, 2):
            model.none = nn.Parameter(torch.empty(0, dtype=options.torch_dtype))
        kind = torch.optim.AdamW if "betas" in settings else torch.optim.SGD
        optimizer = kind(model.parameters(), **settings)
        engine = build_engine(model, options.config, optimizer=optimizer)
        trainer = EngineTrainer(engine, options, strict=False)
        for step in range(4):
            change(head, step)
            start = parameters(head)
            trainer.backward(loss_of(trainer, step))
            trainer.step()
        moved = any(not end.equal(start[name]) for name, end in parameters(head).items())
    is_odd = moved != head.weight.requires_grad
    # Without fp32 copies it is as in PyTorch; and up to 0.18 so is what half precision unfreezes.
    has_copies = options != Options(0)
    assert is_odd == (has_copies and bool(words)) or (moved and change is unfrozen)
    assert len(heard) == (is_odd and dist.get_rank() == 0), heard
    assert all("rebuild.weight, rebuild.bias" in line and words in line for line in heard), heard


@on_ranks
@pytest.mark.parametrize(
    ("stage", "is_outside", "trains", "words"),
    [
        # At ZeRO 1 and 2 the rank that has a part of them raises, and the others go on.
        *((stage, True, True, "2 trainable parameters that are not in the") for stage in (0, 3)),
        *((stage, True, False, "") for stage in (0, 3)),
        *((stage, False, False, "No parameter of the optimizer requires") for stage in (1, 2, 3)),
    ],
)
def test_an_optimizer_that_does_not_fit(
    stage: int, is_outside: bool, trains: bool, words: str
) -> None:
    """A warning before DeepSpeed's error: once, on rank 0."""
    model, guide = models.build("TwoHeads"), nn.Linear(3, 2)
    (guide if is_outside else model).requires_grad_(trains)
    params = [*model.parameters(), *(guide.parameters() if is_outside else ())]
    with applied("weights_by_hand"), listening() as heard, suppress(*ERRORS):
        build_engine(model, Options(stage).config, optimizer=torch.optim.SGD(params, lr=0.1))
    assert len(heard) == (bool(words) and dist.get_rank() == 0)
    assert all(words in line for line in heard), heard
