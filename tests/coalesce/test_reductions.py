"""A step costs one reduction, and at stages 1 and 2 half of the bytes, left as upstream does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_patches.upstream import zero12_layout
from tests import releases
from tests.coalesce.test_blocks import ALIGNED, FIVE_GROUPS, ROUND_ROBIN, SINCE_0_19_7, bucket
from tests.scripts import nested, unsynced, windows
from tests.training import models
from tests.training.collectives import Gradients
from tests.training.models import loss_of
from tests.training.options import ALL_REDUCED, BF16, BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.training.run import applied, make_trainer
from tests.training.stock import since
from tests.training.trainers import engine_of, engine_trainer
from tests.world import World, on_ranks

BLOCK = windows.several_backwards


def reductions(loop: Any, stage: int, backwards: int, more: dict[str, Any]) -> Counter[str]:
    """Of three steps, by operator."""
    if loop is unsynced.stepped_inside:
        more = more | {"micro_steps": backwards}
    with applied("coalesce"):
        trainer = engine_trainer(stage=stage, **more)
        with Gradients() as gradients:
            loop(trainer, backwards)
    return Counter(name for name, _ in gradients.sent)


@on_ranks
@pytest.mark.core_case(loop=BLOCK, more={}, stage=3)
@pytest.mark.core_case(loop=unsynced.all_but_the_last, stage=2)
@pytest.mark.core_case(loop=nested.in_parts, stage=2)
@pytest.mark.parametrize(
    ("loop", "more", "stage"),
    [
        *((BLOCK, more, at) for more in ({}, OFFLOADED, OVERLAP, ALL_REDUCED) for at in (1, 2, 3)),
        *((unsynced.all_but_the_last, {}, at) for at in (1, 2, 3)),
        *((unsynced.stepped_inside, {}, at) for at in (2, 3)),  # at 1 stock's own refuses step()
        *((nested.in_parts, {}, at) for at in (1, 2, 3)),
        *((nested.in_parts_of_a_window, {}, at) for at in (1, 2, 3)),
    ],
)
def test_a_step_costs_one_reduction(stage: int, loop: Any, more: dict[str, Any]) -> None:
    few, many = (reductions(loop, stage, backwards, more) for backwards in (2, 8))
    assert few == many
    assert few.total() > 0
    stocks = stage == 1 and loop is unsynced.all_but_the_last
    assert stocks or few == reductions(BLOCK, stage, 2, more), "as many as a block's"


def one_block(options: Options) -> tuple[Any, list[tuple[str, int]]]:
    """The engine after a block, before the step that takes it, and what that has sent."""
    trainer = make_trainer(models.build(options.model, options.torch_dtype), options)
    with Gradients() as gradients, trainer.window():
        for index in range(3):
            trainer.backward(loss_of(trainer, 0, index))
    return trainer.engine, gradients.sent


def sent(options: Options) -> list[tuple[str, int]]:
    with applied("coalesce"):
        return one_block(options)[1]


def by_upstream(options: Options) -> Options:
    return replace(options, zero={**options.zero, **ALL_REDUCED["zero"]})


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_half_of_the_bytes_of_an_all_reduce(stage: int) -> None:
    """Which crosses the wire twice; and small groups share a collective."""
    options = Options(stage, **FIVE_GROUPS, **bucket(10**6))
    ((name, elements),), upstream = sent(options), sent(by_upstream(options))
    assert name == "_reduce_scatter_base_"
    assert {name for name, _ in upstream} == {"allreduce_"}
    padding = 5 * 2 * 2  # of five groups, to two elements on each of two ranks
    assert elements <= sum(numel for _, numel in upstream) + padding


@on_ranks
def test_staging_stays_within_the_bucket() -> None:
    assert max(elements for _, elements in sent(Options(2, **bucket(24)))) == 24


def left(options: Options) -> dict[str, Any]:
    """What a block leaves in the optimizer."""
    from deepspeed.utils import safe_get_full_grad

    with applied("coalesce"):
        engine, _ = one_block(options)
        optimizer, params = engine.optimizer, list(engine.module.parameters())
        averaged, pending = optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})
        # Upstream's own full gradients are of other parameters there, or none at all.
        reads = "round_robin_gradients" not in options.zero
        assert all(p.grad is None and getattr(p, "grad_accum", None) is None for p in params)
        assert not any(pending.values())
        return {
            "gradients": {index: [*map(torch.clone, views)] for index, views in averaged.items()},
            "full": [safe_get_full_grad(p) for p in params if p.requires_grad and reads],
            "epilogue ran": getattr(optimizer, "_epilogue_ran_this_backward", None),
            "norm": float(optimizer.scaled_global_norm()),
            "in one piece": [hasattr(views, "flat_partition") for views in averaged.values()],
        }


def leaves_alike(options: Options, rounding: float = 0.0) -> None:
    ours, upstream = left(options), left(by_upstream(options))
    assert ours.pop("norm") == pytest.approx(upstream.pop("norm"), rel=1e-6)
    torch.testing.assert_close(ours, upstream, rtol=rounding, atol=rounding)


@on_ranks
@pytest.mark.core_case(stage=2, more=FIVE_GROUPS)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        (2, {}),
        (2, FIVE_GROUPS),
        (2, FIVE_GROUPS | ROUND_ROBIN),
        (2, {"model": "Unused"}),
        (2, {"model": "FrozenTrunk", **OVERLAP}),
        pytest.param(2, ALIGNED, marks=SINCE_0_19_7),
        (2, BF16),
        (2, BF16_SUMS),
        (2, {"settings": {"communication_data_type": "bf16"}}),
    ],
    ids=str,
)
def test_the_optimizer_is_left_as_upstream_leaves_it(stage: int, more: dict[str, Any]) -> None:
    """To the bit: shapes and values of what ``step`` takes, and full gradients."""
    leaves_alike(Options(stage, **more))


def test_the_end_of_a_partition_that_no_parameter_fills(three: World) -> None:
    """It is zero; the buffer has had other gradients there."""
    three.run(leaves_alike, Options(2, **bucket(24)), rounding=1e-6)


SUMMED = {"settings": {"gradient_allreduce_op": "sum"}}


@on_ranks
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(SUMMED, marks=since("0.19.6", "gradient_allreduce_op")),
        OFFLOADED,
    ],
    ids=str,
)
def test_what_is_not_covered(more: dict[str, Any]) -> None:
    assert zero12_layout.covers(engine_of(stage=2).optimizer)
    assert not zero12_layout.covers(engine_of(stage=2, **more).optimizer)


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradcache_has_the_loss_curve_of_the_whole_batch(stage: int) -> None:
    from examples.gradcache import curves

    work = curves.Work(steps=12, chunks=4)
    with applied("coalesce"):
        plain, found = curves.full_batch(work), curves.cached(stage, work, block=True)
    assert not found.error
    assert found.losses == pytest.approx(plain.losses, abs=1e-5)
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert found.reductions == {1}


@pytest.mark.exhaustive
def test_the_command() -> None:
    """It ends with 0 if all that it prints is right."""
    command = [sys.executable, "-m", "examples.gradcache", "--steps", "4"]
    done = subprocess.run(command, cwd=releases.ROOT, capture_output=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, b"")
