"""Weights that a script changes itself, between steps: they are what the next step begins with."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from ds_patches.upstream import classes
from tests.harness import Case, applied, at, cases, models, of, stock, trains
from tests.harness.models import loss_of
from tests.harness.options import ADAM, BF16, BF16_SUMS, FP16, OFFLOADED, OFFLOADED_ALL, PERSISTENT
from tests.harness.surroundings import build_engine
from tests.harness.trainers import EngineTrainer
from tests.world import on_ranks

PATCH = "weights_by_hand"
#: Without these, some releases get the same training wrong where nothing is changed.
OTHERS = "half_without_zero zero3_retain accumulation"


def beside_others(*stages: int, **options: Any) -> Any:
    return lambda patches, script: of(f"{patches} {OTHERS}", script, *stages, **options)


ROWS = (
    at(1, 2, 3, core={2}),
    at(1, 2, 3, **BF16, core={3}),
    beside_others(0, **BF16, core={0}),
    beside_others(1, **BF16_SUMS),
    at(2, 3, **OFFLOADED, core={2}),
    at(3, **OFFLOADED_ALL, zero=PERSISTENT),
    at(2, 3, **BF16, **OFFLOADED, rates=(0.1, 0.2)),
)


def changed(trainer: Any, module: Any = None) -> Any:
    """A block in which the parameters of a module may be changed, or all."""
    params = [*(module or trainer.module).parameters()]
    if not trainer.is_engine:
        return trainer.gathered(params)
    from deepspeed.runtime.zero import GatheredParameters

    enabled = any(hasattr(param, "ds_id") for param in params)
    return GatheredParameters(params, modifier_rank=0, enabled=enabled)


FP16_ROWS = beside_others(0, 1, 3, **FP16, core={0}), beside_others(0, **FP16, fused=True)


@trains(PATCH, *ROWS, *FP16_ROWS)
def test_between_steps(trainer: Any, step: int) -> None:
    """All loaded before the first step; a WGAN's clamped; a head initialised after a backward."""
    if step < 2:
        with changed(trainer), torch.no_grad():
            for param in trainer.module.parameters():
                if step:
                    param.clamp_(-0.2, 0.2)
                else:
                    param.mul_(0.5)
    trainer.backward(loss_of(trainer, step))
    if step == 2:
        with changed(trainer, head := trainer.module.rebuild):
            for param in head.parameters():
                nn.init.constant_(param, 0.125)


@trains(
    PATCH,
    beside_others(1, 2, 3),
    beside_others(0, 1, 2, 3, **BF16, core={0, 2, 3}),
    beside_others(2, 3, **BF16, **OFFLOADED),
)
def test_perturbed(trainer: Any, step: int) -> None:
    """Weights for a backward alone, as SAM does."""
    for sign in (1, -1):
        with changed(trainer), torch.no_grad():
            for param in trainer.module.parameters():
                param.add_(0.05, alpha=sign)
        if sign > 0:
            trainer.backward(loss_of(trainer, step))


@trains(
    PATCH,
    beside_others(1, 2, 3, micro_steps=2),
    beside_others(2, 3, **BF16, micro_steps=2, **OFFLOADED),
)
def test_between_micro_steps(trainer: Any, step: int, micro: int) -> None:
    if micro:
        with changed(trainer, head := trainer.module.rebuild), torch.no_grad():
            for param in head.parameters():
                param.mul_(0.5)
    trainer.backward(loss_of(trainer, step, micro))


# --- What nobody changed stays as it is -----------------------------------------------------------


def copies(trainer: EngineTrainer) -> list[Tensor]:
    """In fp32, which are stepped."""
    if classes.is_fp16_wrapper(optimizer := trainer.engine.optimizer):
        groups = getattr(optimizer, "fp32_groups", None) or [optimizer.fp32_groups_flat]
        return [weight.clone() for group in groups for weight in group]
    return [safe_get_full_fp32_param(param) for param in trainer.module.parameters()]


@torch.no_grad()
def there_and_back(trainer: EngineTrainer) -> None:
    """A perturbation that is added and subtracted, as SAM's: bf16 rounds on both ways."""
    params = [*trainer.module.parameters()]
    for sign in (1, -1):
        with changed(trainer):
            if sign > 0:
                own = [param.clone() for param in params]
                added = [param * 0.7 for param in params]
            for param, value in zip(params, added, strict=True):
                param.add_(value, alpha=sign)
            if sign < 0 and trainer.options.dtype != "float32":
                assert not all(map(torch.equal, own, params))


def resumed(trainer: EngineTrainer) -> None:
    trainer.save()
    trainer.load()


BOTH = [stock.since("0.19.8", "offload_states() of ZeRO-1 and ZeRO-2 where there is no GPU")]
OFFLOADS = of(OTHERS, EngineTrainer.offload, 1, 2, **ADAM, **BF16, marks=BOTH)
SCRIPTS = (
    of(OTHERS, script, stage, **ADAM, **more, core=(0, 1, 2, 3) if more else ())
    for script in (there_and_back, resumed)
    for stage, more in [
        (0, BF16),
        (1, BF16),
        (1, BF16_SUMS),
        (2, {}),
        (2, {**BF16, **OFFLOADED}),
        (3, {}),
        (3, BF16),
        (3, {**BF16, **OFFLOADED_ALL}),
    ]
)


@on_ranks
@cases(*SCRIPTS, OFFLOADS)
def test_copies_stay_to_the_bit(case: Case, tmp_path: Path) -> None:
    ends = []
    for patches in [case.patches, (PATCH, *case.patches)]:
        with applied(*patches):
            model = models.build("TwoHeads", case.options.torch_dtype)
            trainer = EngineTrainer(build_engine(model, case.options.config), case.options)
            trainer.folder = tmp_path
            for step in range(3):
                trainer.backward(loss_of(trainer, step))
                trainer.step()
                case.script(trainer)
            trainer.backward(loss_of(trainer, 3))
            trainer.step()
            ends.append(copies(trainer))
    assert all(map(torch.equal, *ends))
