"""Reduce-scatters straight into the flat partitions, on plain tensors and on engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version

from ds_patches.coalesce.flat_reduction import Flush
from tests.coalesce import flat, flat_engines
from tests.coalesce.loops import UPSTREAM
from tests.training import stock
from tests.training.groups import group_of
from tests.training.options import BF16_SUMS, OFFLOADED, Options
from tests.world import World

# --- Plain tensors ------------------------------------------------------------------------------


def flushed(problem: dict[str, Any], scatters: bool = True) -> tuple[float, flat.Traffic]:
    case = flat.Problem(**problem)
    with flat.backend(scatters), flat.Traffic() as traffic:
        Flush(case.layout).reduce()
    return case.worst(), traffic.seen


def worst(world: World, scatters: bool = True, **problem: Any) -> float:
    outcomes = world.run(flushed, problem, scatters)
    assert len({tuple(seen) for _, seen in outcomes}) == 1, "the ranks sent different things"
    return max(difference for difference, _ in outcomes)


@pytest.mark.parametrize("bucket", [1, 5, 24, 10**6])
@pytest.mark.parametrize("gap", [0, 3])
def test_each_rank_gets_its_partition(world: World, gap: int, bucket: int) -> None:
    assert worst(world, gap=gap, bucket=bucket) == 0.0


@pytest.mark.parametrize("bucket", [5, 24, 10**6])
def test_three_ranks(three: World, bucket: int) -> None:
    assert worst(three, bucket=bucket, gap=1) <= 1e-6


def of_a_group() -> float:
    """Ranks 0 and 2; rank 1 is alone. The second of the two is not rank 1 of the world."""
    case = flat.Problem(bucket=24, group=group_of([[0, 2], [1]]))
    Flush(case.layout).reduce()
    return case.worst()


def test_some_ranks_of_three(three: World) -> None:
    assert three.run(of_a_group) == [0.0] * 3


@pytest.mark.parametrize(
    ("grads", "comm", "sums"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_two_ranks_sum_to_the_bit_in_the_communication_dtype(
    world: World, grads: torch.dtype, comm: torch.dtype, sums: torch.dtype
) -> None:
    assert worst(world, grads=grads, comm=comm, sums=sums) == 0.0


def test_a_missing_gradient_counts_as_zeros(world: World) -> None:
    """On one rank, and on both; then and only then the ranks need not agree on them."""
    assert worst(world, missing=[(0, 1), (1, 2), (0, 4), (1, 4)]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backend_without_reduce_scatter(world: World, dtype: torch.dtype) -> None:
    assert worst(world, scatters=False, grads=dtype, comm=dtype) == 0.0


def test_small_groups_share_a_chunk(world: World) -> None:
    shapes = [[(4,)]] * 10
    (_, seen), _ = world.run(flushed, {"shapes": shapes, "bucket": 10**6})
    assert seen == [("_reduce_scatter_base_", 40)]


def test_staging_stays_within_the_bucket(world: World) -> None:
    (_, seen), _ = world.run(flushed, {"bucket": 24})
    assert max(elements for _, elements in seen) <= 24 < sum(elements for _, elements in seen)


# --- Engines ------------------------------------------------------------------------------------

#: ``zero_optimization.parameter_alignment``: padding between parameters.
ALIGNS_PARAMETERS = Version("0.19.7")

#: ``gradient_allreduce_op``: gradients that are added up and not averaged.
SUMS = Version("0.19.6")


def holds(world: World, groups: int = 1, **options: Any) -> tuple[list[tuple[str, int]], float]:
    """What both ranks have sent, for the sum that is plain PyTorch's."""
    found = world.run(flat_engines.train, Options(**options), groups)
    for outcome, _, _ in found:
        assert outcome.equal, outcome
    (_, *sent), (_, *others) = found
    assert sent == others
    return sent[0], sent[1]


def test_fp32_on_the_wire(world: World) -> None:
    holds(world, stage=2, **BF16_SUMS, settings={"communication_data_type": "fp32"})


@pytest.mark.core_case(stage=2, model="Unused")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["Unused", "Widening"])
def test_parameters_that_are_not_reached(world: World, model: str, stage: int) -> None:
    holds(world, model=model, stage=stage)


@pytest.mark.parametrize("round_robin", [False, True], ids=["", "round robin"])
@pytest.mark.parametrize("groups", [2, 5])
def test_several_groups(world: World, groups: int, round_robin: bool) -> None:
    holds(world, groups=groups, stage=2, zero={"round_robin_gradients": round_robin})


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_goes_by_the_norm_of_the_sum(world: World, stage: int) -> None:
    holds(world, groups=2, stage=stage, clip=0.05)


def test_half_of_the_bytes_of_an_all_reduce(world: World) -> None:
    ours, _ = holds(world, groups=2, stage=2, steps=1)
    upstream, elements = holds(world, groups=2, stage=2, steps=1, **UPSTREAM)
    assert {name for name, _ in upstream} == {"allreduce_"}
    reductions = [numel for name, numel in ours if name == "_reduce_scatter_base_"]
    padding = 2 * 2 * 2  # two ranks, two groups, two elements of alignment
    assert sum(reductions) <= elements / 2 + padding
    assert len(reductions) == len(ours) <= len(upstream)


def test_an_overflow_on_one_rank_skips_the_step_on_all(world: World) -> None:
    for first, second in world.run(flat_engines.overflowing):
        assert first == (True, 0.0)
        assert second[0] is False
        assert second[1] > 1e-3


@pytest.mark.parametrize(
    ("stage", "more", "expected"),
    [
        (1, {}, True),
        (2, BF16_SUMS, True),
        (1, BF16_SUMS, False),  # BF16_Optimizer
        (3, {}, False),
        (2, OFFLOADED, False),
        (2, {"zero": {"reduce_scatter": False}}, False),
    ],
    ids=str,
)
def test_what_is_covered(world: World, stage: int, more: dict[str, Any], expected: bool) -> None:
    assert world.run(flat_engines.covered, Options(stage, **more)) == [expected] * 2


@pytest.mark.exhaustive
def test_torch_autocast_is_not_covered(fresh_world: World) -> None:
    """Its parameters have communication dtypes of their own, and it is on for good."""
    settings = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert fresh_world.run(flat_engines.covered, Options(2, settings=settings)) == [False] * 2


@pytest.mark.skipif(stock.RELEASE < SUMS, reason=f"gradients are always averaged before {SUMS}")
def test_sums_are_not_covered(world: World) -> None:
    settings = {"gradient_allreduce_op": "sum"}
    assert world.run(flat_engines.covered, Options(2, settings=settings)) == [False] * 2


@pytest.mark.core_case(case={"stage": 2, "groups": 3})
@pytest.mark.parametrize(
    "case",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "groups": 3},
        {"stage": 2, "groups": 2, "zero": {"round_robin_gradients": True}},
        {"stage": 2, "model": "Unused"},
        {"stage": 2, "model": "FrozenTrunk", "zero": {"overlap_comm": True}},
        {"stage": 2, "zero": {"parameter_alignment": True}},
        {"stage": 2, **BF16_SUMS},
    ],
    ids=str,
)
def test_the_optimizer_is_left_as_upstream_leaves_it(world: World, case: dict[str, Any]) -> None:
    """To the bit: shapes and values of what ``step`` takes, norms, and full gradients."""
    # Upstream's own full gradients are of other parameters there, or none at all.
    full, groups = "round_robin" not in str(case), case.get("groups", 1)
    options = Options(**{name: value for name, value in case.items() if name != "groups"})
    all_reduced = replace(options, zero={**options.zero, **UPSTREAM["zero"]})
    if "parameter_alignment" in str(case) and stock.RELEASE < ALIGNS_PARAMETERS:
        pytest.skip(
            f"DeepSpeed {stock.RELEASE} has no parameter_alignment ({ALIGNS_PARAMETERS} has)"
        )
    for ours, upstream in zip(
        world.run(flat_engines.reduced, options, groups, full),
        world.run(flat_engines.reduced, all_reduced, groups, full),
        strict=True,
    ):
        assert ours["left over"] == [] == ours["pending"]
        assert ours["epilogue ran"] == upstream["epilogue ran"]
        assert ours["owns its memory"] == upstream["owns its memory"]
        assert ours["norm"] == pytest.approx(upstream["norm"], rel=1e-6)
        assert ours["gradients"].keys() == upstream["gradients"].keys()
        for index, expected in upstream["gradients"].items():
            found = ours["gradients"][index]
            assert [shape for shape, _ in found] == [shape for shape, _ in expected]
            for (_, view), (_, reference) in zip(found, expected, strict=True):
                assert torch.equal(view, reference)
        for name, expected in upstream["full"].items():
            assert torch.equal(ours["full"][name].float(), expected.float()), name
