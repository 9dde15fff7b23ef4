"""At stages 1 and 2 a block is reduce-scattered straight into the flat partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ds_patches.coalesce.upstream import flat_layout
from tests.coalesce.loops import BACKWARDS, UPSTREAM, several_backwards
from tests.training import models, stock
from tests.training.models import loss_of
from tests.training.options import BF16, BF16_SUMS, FP16, OFFLOADED, Options
from tests.training.run import applied, check, make_trainer
from tests.training.stock import since
from tests.training.trainers import engine_of
from tests.world import World

TWO_GROUPS, FIVE_GROUPS = {"rates": (0.1,) * 2}, {"rates": (0.1,) * 5}
ROUND_ROBIN = {"zero": {"round_robin_gradients": True}}


def bucket(elements: int) -> dict[str, Any]:
    return {"zero": {"reduce_bucket_size": elements}}


#: Padding between parameters.
ALIGNED = {"zero": {"parameter_alignment": True}}
#: Gradients are added up and not averaged.
SUMMED = {"settings": {"gradient_allreduce_op": "sum"}}


@pytest.mark.core_case(stage=2, more={"model": "Unused"})
@pytest.mark.core_case(more=TWO_GROUPS | {"clip": 0.05})
@pytest.mark.parametrize(
    "more",
    [
        bucket(1) | {"steps": 1},
        *map(bucket, (24, 10**6)),
        pytest.param(ALIGNED, marks=since("0.19.7", "parameter_alignment")),
        {"model": "Unused"},
        {"model": "Widening"},
        FIVE_GROUPS,
        TWO_GROUPS | ROUND_ROBIN,
        FIVE_GROUPS | ROUND_ROBIN,
        TWO_GROUPS | {"clip": 0.05},
        BF16_SUMS | {"settings": {"communication_data_type": "fp32"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_add_up(world: World, stage: int, more: dict[str, Any]) -> None:
    stock.needs_a_zero_optimizer(stage, more)
    check(world, several_backwards, Options(stage, **more), "coalesce")


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    """Three ranks: divisors that are no power of two, partitions that end in odd places."""
    with World(3) as living:
        yield living


@pytest.mark.parametrize("more", [*map(bucket, (24, 10**6)), FIVE_GROUPS, {"clip": 0.05}])
def test_three_ranks(three: World, more: dict[str, Any]) -> None:
    check(three, several_backwards, Options(2, **more), "coalesce")


def by_all_reduces(trainer: Any) -> None:
    """On a backend that says about reduce-scatter what gloo said before it had it."""
    renamed = hasattr(dist, "reduce_scatter_single")
    name = "reduce_scatter_single" if renamed else "reduce_scatter_tensor"
    refusal = RuntimeError("Backend gloo does not support _reduce_scatter_base")
    with mock.patch.object(dist, name, side_effect=refusal):
        several_backwards(trainer)


@pytest.mark.parametrize("more", [{}, BF16, FIVE_GROUPS], ids=str)
def test_a_backend_without_reduce_scatter(world: World, more: dict[str, Any]) -> None:
    check(world, by_all_reduces, Options(2, **more), "coalesce")


def overflowing_on_one_rank(trainer: Any) -> None:
    """In one of three steps, which all ranks skip."""
    for step in trainer.steps():
        if step == 1 and not trainer.is_engine:
            continue
        with trainer.window():
            for micro in range(BACKWARDS):
                bad = step == micro == dist.get_rank() == 1
                trainer.backward(loss_of(trainer, step, micro) * (float("inf") if bad else 1))
        trainer.step()


def test_an_overflow_on_one_rank_skips_the_step_on_all(world: World) -> None:
    check(world, overflowing_on_one_rank, Options(2, **FP16), "coalesce")


# --- What is sent, and what is left ---------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Operator and elements of every reduction, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("c10d::")
        if "reduce" in name:
            tensors = args[1] if "scatter" in name else args[0]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            self.seen.append((name, sum(tensor.numel() for tensor in tensors)))
        return function(*args, **(kwargs or {}))


def one_block(options: Options) -> tuple[Any, list[tuple[str, int]]]:
    """The engine after a block, before the step that takes it, and what that has sent."""
    trainer = make_trainer(models.build(options.model, options.torch_dtype), options)
    with Sent() as sent, trainer.window():
        for index in range(BACKWARDS):
            trainer.backward(loss_of(trainer, 0, index))
    return trainer.engine, sent.seen


def sent(options: Options) -> list[tuple[str, int]]:
    with applied("coalesce"):
        return one_block(options)[1]


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_half_of_the_bytes_of_an_all_reduce(world: World, stage: int) -> None:
    """Which crosses the wire twice; and small groups share a collective."""
    options = Options(stage, **FIVE_GROUPS, **bucket(10**6))
    all_reduced = replace(options, zero={**options.zero, **UPSTREAM["zero"]})
    (ours, others), (upstream, _) = world.run(sent, options), world.run(sent, all_reduced)
    ((name, elements),) = ours
    assert ours == others
    assert name == "_reduce_scatter_base_"
    assert {name for name, _ in upstream} == {"allreduce_"}
    padding = 5 * 2 * 2  # of five groups, to two elements on each of two ranks
    assert elements <= sum(numel for _, numel in upstream) + padding


def test_staging_stays_within_the_bucket(world: World) -> None:
    for found in world.run(sent, Options(2, **bucket(24))):
        assert max(elements for _, elements in found) == 24


def left(options: Options) -> dict[str, Any]:
    """What a block leaves in the optimizer."""
    from deepspeed.utils import safe_get_full_grad

    with applied("coalesce"):
        engine, _ = one_block(options)
        optimizer, params = engine.optimizer, list(engine.module.parameters())
        averaged, pending = optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})
        # Upstream's own full gradients are of other parameters there, or none at all.
        reads = "round_robin_gradients" not in options.zero
        return {
            "gradients": {index: [*map(torch.clone, views)] for index, views in averaged.items()},
            "full": [safe_get_full_grad(p) for p in params if p.requires_grad and reads],
            "on parameters": any(
                p.grad is not None or getattr(p, "grad_accum", None) is not None for p in params
            ),
            "pending": any(pending.values()),
            "epilogue ran": getattr(optimizer, "_epilogue_ran_this_backward", None),
            "norm": float(optimizer.scaled_global_norm()),
            "in one piece": [hasattr(views, "flat_partition") for views in averaged.values()],
        }


@pytest.mark.core_case(stage=2, more=FIVE_GROUPS)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        (2, {}),
        (2, FIVE_GROUPS),
        (2, TWO_GROUPS | ROUND_ROBIN),
        (2, {"model": "Unused"}),
        (2, {"model": "FrozenTrunk", "zero": {"overlap_comm": True}}),
        pytest.param(2, ALIGNED, marks=since("0.19.7", "parameter_alignment")),
        (2, BF16),
        (2, BF16_SUMS),
        (2, {"settings": {"communication_data_type": "bf16"}}),
    ],
    ids=str,
)
def test_the_optimizer_is_left_as_upstream_leaves_it(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    """To the bit: shapes and values of what ``step`` takes, and full gradients."""
    leaves_alike(world, Options(stage, **more))


def test_the_end_of_a_partition_that_no_parameter_fills(three: World) -> None:
    """It is zero; the buffer has had other gradients there."""
    leaves_alike(three, Options(2, **bucket(24)), rounding=1e-6)


def leaves_alike(world: World, options: Options, rounding: float = 0.0) -> None:
    all_reduced = replace(options, zero={**options.zero, **UPSTREAM["zero"]})
    for ours, upstream in zip(world.run(left, options), world.run(left, all_reduced), strict=True):
        assert not ours["on parameters"]
        assert not ours["pending"]
        assert ours.pop("norm") == pytest.approx(upstream.pop("norm"), rel=1e-6)
        torch.testing.assert_close(ours, upstream, rtol=rounding, atol=rounding)


def covered(options: Options) -> bool:
    return flat_layout.covers(engine_of(**vars(options)).optimizer)


@pytest.mark.parametrize(
    ("stage", "more", "expected"),
    [
        (1, {}, True),
        (2, BF16_SUMS, True),
        (1, BF16_SUMS, False),  # BF16_Optimizer
        (3, {}, False),
        (2, OFFLOADED, False),
        (2, UPSTREAM, False),
        pytest.param(2, SUMMED, False, marks=since("0.19.6", "gradient_allreduce_op")),
    ],
    ids=str,
)
def test_what_is_covered(world: World, stage: int, more: dict[str, Any], expected: bool) -> None:
    assert world.run(covered, Options(stage, **more)) == [expected] * 2


@pytest.mark.exhaustive
def test_torch_autocast_is_not_covered(fresh_world: World) -> None:
    """Its parameters have communication dtypes of their own, and it is on for good."""
    settings = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert fresh_world.run(covered, Options(2, settings=settings)) == [False] * 2
