"""Half precision without ZeRO: it trains as plain PyTorch, the loss scale is one, it resumes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_patches.core.errors import Refused
from tests.harness import EngineTrainer, applied, engine_trainer, models, on_ranks, run
from tests.harness.cases import at, checked, of, trains
from tests.harness.models import loss_of
from tests.harness.options import ADAM, ADAMW, BF16, BF16_SUMS, FP16, Given, Options
from tests.harness.pipelines import Pipeline
from tests.harness.pipelines import run as run_pipeline
from tests.harness.pipelines import train as train_pipeline
from tests.harness.stock import RELEASE, TORCH_STYLE, Version
from tests.harness.surroundings import half_precision_allowed
from tests.scripts.ordinary import micro_steps as train

PATCH = "half_without_zero"
PATCHES = (PATCH, *(["pipelines"] if Version("0.19.2") >= RELEASE else []))
#: fp16: from there on no loss is scaled; with FusedAdam stock takes no step at all.
UNSCALED = TORCH_STYLE
STANDS_STILL = Version("0.17.6") <= RELEASE <= Version("0.18.1")

#: Stock takes an optimizer of bf16 for one of ZeRO's, whose states it loses.
LOSES_STATE = Version("0.17.6") <= RELEASE <= Version("0.18.4")

IS_FP16S = pytest.mark.skipif(
    Version("0.17.6") > RELEASE,
    reason="up to 0.17.5 bf16 without ZeRO has an optimizer that takes no first step",
)

OPTIONS: Given = {"steps": 4, "model": "TwoHeads", "micro_steps": 1, "rates": (0.2,)}
RISING: Given = {"settings": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
RISING["settings"]["fp16"]["loss_scale_window"] = 1
STATIC: Given = {"settings": {"fp16": {"enabled": True, "loss_scale": 96}}}
EITHER = {"fused": False}, {"fused": True}
HAS_TIMERS = pytest.mark.skipif(
    Version("0.17.1") > RELEASE, reason="stock asks a timer that is not there"
)


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize(
    ("more", "is_wrong"),
    [
        (FP16, UNSCALED),
        (FP16 | {"fused": True}, UNSCALED or STANDS_STILL),
        (FP16 | RISING, True),
    ],
    ids=str,
)
def test_stock_is_wrong(more: Given, is_wrong: bool) -> None:
    """In fp16; `prove bf16` shows it of bf16. It also divides by a scale that rises."""
    assert run(train, Options(0, **{**OPTIONS, **more})).equal != is_wrong


def trained(core: bool = False, **options: Any) -> list[Any]:
    return of(PATCH, train, 0, core={0} if core else (), **OPTIONS | options)


test_patched = checked(
    *(
        trained(core=not clip, **BF16, micro_steps=count, clip=clip)
        for count in (1, 4)
        for clip in (0.0, 0.5)
    ),
    *(
        row
        for fused in EITHER
        for row in (
            trained(core=True, **FP16 | fused),
            trained(core=True, **FP16 | RISING | fused, clip=0.5),
            trained(**FP16 | RISING | fused),
            *(trained(**FP16 | fused, micro_steps=4, clip=clip) for clip in (0.0, 0.5)),
            *(trained(**FP16 | fused | {"model": m}) for m in ("FrozenTrunk", "TiedEmbedding")),
            trained(**FP16 | fused | {"rates": (0.1, 0.3)}),
        )
    ),
    trained(**FP16 | STATIC),
    trained(marks=[HAS_TIMERS], **FP16 | STATIC, fused=True),
    of(f"accumulation {PATCH}", train, 0, **OPTIONS | FP16 | {"micro_steps": 2}),
)


@on_ranks
@pytest.mark.core_case(half=FP16)
@pytest.mark.parametrize("half", [FP16, pytest.param(BF16, marks=IS_FP16S)], ids=str)
def test_the_first_step_is_the_first(half: Given) -> None:
    """Adam with weight decay: stock takes a step of zeros before the first."""
    params = ADAMW["params"] | {"weight_decay": 0.5}
    settings = {"optimizer": ADAMW | {"params": params}}
    with half_precision_allowed(), applied(PATCH):
        model = models.build("TwoHeads", Options(**half).torch_dtype)
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # of a look at the model before, which stock drops
        trainer = engine_trainer(model, stage=0, rates=(params["lr"],), settings=settings, **half)
        assert all(param.grad is None for param in trainer.module.parameters())
        weights = [torch.nn.Parameter(p.detach().float()) for p in trainer.module.parameters()]
        trainer.backward(loss_of(trainer, 0))
        scale = trainer.engine.optimizer.loss_scale if half == FP16 else 1.0
        for weight, its in zip(weights, trainer.module.parameters(), strict=True):
            weight.grad = its.grad.float() / scale
        trainer.step()
    torch.optim.AdamW(weights, lr=params["lr"], weight_decay=0.5).step()
    stepped = [master for group in trainer.engine.optimizer.fp32_groups for master in group]
    furthest = max((a - b).abs().max() for a, b in zip(weights, stepped, strict=True))
    assert furthest < params["lr"] / 100


@trains(
    PATCH,
    *(at(0, core={0}, rates=(0.2,), **FP16 | fused) for fused in EITHER),
    at(0, rates=(0.2,), **FP16 | STATIC),
    at(0, rates=(0.2,), marks=[HAS_TIMERS], **FP16 | STATIC, fused=True),
)
def test_an_overflow_on_one_rank(trainer: Any) -> None:
    for step in trainer.steps():
        if step == 1 and not trainer.is_engine:
            continue
        loss = loss_of(trainer, step)
        trainer.backward(loss * 1e30 if step == 1 and dist.get_rank() == 1 else loss)
        trainer.step()
        assert not trainer.is_engine or trainer.engine.optimizer.overflow == (step == 1)


@trains("", *(at(0, rates=(0.2,), **half) for half in (BF16, FP16)), says=None)
def test_an_engine_that_was_there_before(trainer: Any) -> None:
    with applied(PATCH):
        train(trainer)


@on_ranks
@pytest.mark.parametrize("fused", EITHER)
def test_what_the_engine_tells(fused: Given) -> None:
    with half_precision_allowed(), applied(PATCH):
        trainer = engine_trainer(stage=0, **FP16 | RISING | fused)
        loss = loss_of(trainer, 0)
        result = trainer.engine.backward(loss)
        scale = trainer.engine.optimizer.loss_scale
        grads = [p.grad.float() / scale for p in trainer.module.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        trainer.step()
        reported = trainer.engine.get_global_grad_norm()
        assert reported == pytest.approx(norm, rel=1e-2)
        assert UNSCALED is False or float(result) == pytest.approx(float(loss))
        trainer.backward(loss_of(trainer, 1) * 1e30)
        trainer.step()
        assert trainer.engine.optimizer.overflow
        assert trainer.engine.get_global_grad_norm() in (reported, float("inf"))  # since 0.19.8


@on_ranks
@pytest.mark.skipif(not TORCH_STYLE, reason="engine.scale came with 0.18.3")
def test_scale() -> None:
    with half_precision_allowed(), applied(PATCH):
        trainer = engine_trainer(stage=0, **FP16)
        for loss in (loss_of(trainer, 0), loss_of(trainer, 0).half() * 1000):
            scaled = float(trainer.engine.scale(loss=loss))
            assert scaled == pytest.approx(256 * float(loss))
        assert scaled > torch.finfo(torch.float16).max


# --- A resumed training goes on as one that was not interrupted -----------------------------------


def train_on(trainer: EngineTrainer, steps: range) -> None:
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
        train_on(first, range(3))
        first.save()
        train_on(first, range(3, 6))
        second.load()
        train_on(second, range(3, 6))
    assert second.engine.global_steps == 6
    for param, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(param, other)


@on_ranks
@pytest.mark.core_case(only_module=False)
@pytest.mark.skipif(not LOSES_STATE, reason="stock saves the optimizer's state in this release")
@pytest.mark.parametrize("only_module", [False, True])
def test_what_stock_has_saved(tmp_path: Path, only_module: bool) -> None:
    options = {"stage": 0, **ADAM, **BF16}
    first, second = (engine_trainer(folder=tmp_path, **options) for _ in range(2))
    with applied(PATCH):
        train_on(first, range(3))
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


# --- Pipelines: every stage has the scale of the last one's loss ----------------------------------

PIPELINE = Pipeline(dtype="float16", micro_steps=1)


@on_ranks
@pytest.mark.core_case(more={})
@pytest.mark.core_case(more={"micro_steps": 4})
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stages": 1},
        {"micro_steps": 4},
        *({"micro_steps": 4, **more} for more in ({"clip": 0.5}, {"pair": True})),
    ],
    ids=str,
)
def test_a_pipeline(more: Given) -> None:
    outcome = run_pipeline(replace(PIPELINE, **more), *PATCHES)
    assert outcome.equal, outcome
    assert outcome.losses == pytest.approx(outcome.expected, abs=2e-2)


def one_stage_overflows(options: Pipeline, engine: Any) -> list[float]:
    """In a step between two others; all stages skip it, and lower their scale."""
    losses = train_pipeline(options, engine, [0])
    params = [*engine.module.parameters()] if engine.is_first_stage() else []
    hooks = [param.register_hook(lambda grad: grad * float("inf")) for param in params]
    train_pipeline(options, engine, [9])
    assert engine.optimizer.overflow
    assert engine.optimizer.loss_scale == 128
    for hook in hooks:
        hook.remove()
    return losses + train_pipeline(options, engine, range(1, options.steps))


@on_ranks
@pytest.mark.core_case
def test_an_overflow_on_one_stage() -> None:
    outcome = run_pipeline(PIPELINE, *PATCHES, script=one_stage_overflows)
    assert outcome.equal, outcome
