"""One window is one step: the sum that plain PyTorch has, whatever the ZeRO settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coalesce import cases, experts, micro_steps, releases
from tests.coalesce.micro_steps import OFFLOADED
from tests.world import World

STAGES = [1, 2, 3]

OFFLOADED_ALL = {
    "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
UPSTREAM = {"flush": "upstream"}

#: An offloaded optimizer has upstream's flush whatever the option says.
by_settings_and_flush = pytest.mark.parametrize(
    ("settings", "flush"),
    [({}, "reduce_scatter"), ({}, "upstream"), (OFFLOADED, "reduce_scatter")],
    ids=["", "upstream", "offloaded"],
)


def outcome(world: World, **case: Any) -> cases.Outcome:
    """The outcome of `case`, which must be the same on both ranks."""
    first, second = world.run(cases.train, **case)
    assert (first.difference, first.error) == (second.difference, second.error)
    return first


def check(world: World, dtype: str = "float32", **case: Any) -> None:
    result = outcome(world, dtype=dtype, **case)
    assert result.equal(dtype), result


@pytest.mark.core_case(flush="reduce_scatter", contiguous=True, overlap=True)
@pytest.mark.parametrize(
    ("contiguous", "overlap", "flush"),
    [  # every pair of values, at every stage
        (True, True, "reduce_scatter"),
        (True, False, "upstream"),
        (False, False, "reduce_scatter"),
        (False, True, "upstream"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_is_a_sum(
    world: World, stage: int, contiguous: bool, overlap: bool, flush: str
) -> None:
    if stage < 3 and flush == "upstream" and not contiguous:
        releases.needs_non_contiguous()
    zero = {"contiguous_gradients": contiguous, "overlap_comm": overlap}
    check(world, stage=stage, settings={"zero": zero}, options={"flush": flush})


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_upstreams_own_flush(world: World, stage: int) -> None:
    check(world, stage=stage, options=UPSTREAM)


@pytest.mark.core_case(stage=2)
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_optimizer(world: World, stage: int) -> None:
    check(world, stage=stage, settings=OFFLOADED)


def test_offloaded_parameters(world: World) -> None:
    check(world, stage=3, settings=OFFLOADED_ALL)


@pytest.mark.parametrize("flush", ["reduce_scatter", "upstream"])
@pytest.mark.parametrize("bucket", [40, 10**6])  # 500 is everywhere else's
@pytest.mark.parametrize("stage", STAGES)
def test_buckets(world: World, stage: int, bucket: int, flush: str) -> None:
    settings = {"zero": {"reduce_bucket_size": bucket}}
    check(world, stage=stage, settings=settings, options={"flush": flush})


@pytest.mark.parametrize(
    "model",
    ["FrozenTrunk", "SharedBlock", "TiedEmbedding", "Reentrant", "NonReentrant", "LeafModule"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_models(world: World, stage: int, model: str) -> None:
    check(world, stage=stage, model=model)


@pytest.mark.parametrize("style", ["scale", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_torch_style(world: World, stage: int, style: str) -> None:
    releases.needs_torch_style(style)
    check(world, stage=stage, style=style)


@pytest.mark.parametrize("clip", [1e-2, 1e9])
@pytest.mark.parametrize("settings", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping(world: World, stage: int, settings: dict[str, Any], clip: float) -> None:
    for found, expected in world.run(cases.norm_of_a_window, stage, clip, settings):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.core_case(stage=2, accumulate_in="fp32", flush="reduce_scatter")
@by_settings_and_flush
@pytest.mark.parametrize("accumulate_in", [None, "fp32"], ids=["low", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(
    world: World, stage: int, accumulate_in: str | None, settings: dict[str, Any], flush: str
) -> None:
    config: dict[str, Any] = {**settings, "bf16": {"enabled": True}}
    if accumulate_in:
        config["data_types"] = {"grad_accum_dtype": accumulate_in}
    if stage == 1 and accumulate_in and not settings:
        pytest.skip("bf16 with fp32 gradients at stage 1 is BF16_Optimizer, which is refused")
    check(world, "bfloat16", stage=stage, settings=config, options={"flush": flush})


@pytest.mark.parametrize("stage", STAGES)
def test_float16_with_a_dynamic_loss_scale(world: World, stage: int) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    check(world, "float16", stage=stage, settings=config)


@pytest.mark.parametrize("handshake", ["store", "off"])  # "on" is everywhere else's
def test_ways_to_meet(world: World, handshake: str) -> None:
    check(world, stage=2, options={"handshake": handshake})


@pytest.mark.parametrize("stage", STAGES)
def test_boundaries_inside_a_window(world: World, stage: int) -> None:
    for result in world.run(cases.with_boundaries_inside, stage):
        assert result.equal(), result


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_accumulation_divides_the_loss(world: World, stage: int) -> None:
    for result in world.run(cases.with_micro_steps, stage):
        assert result.equal(), result


@pytest.mark.core_case(settings=OFFLOADED, stage=2)
@by_settings_and_flush
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_rest(
    world: World, stage: int, settings: dict[str, Any], flush: str
) -> None:
    """On one rank only, on both, in some steps: they count as zeros."""
    for result in world.run(cases.with_resting_heads, stage, settings, flush):
        assert result.equal(), result


@pytest.mark.parametrize("stage", STAGES)
def test_like_several_backwards_on_stock(world: World, stage: int) -> None:
    """Stock adds backwards up if only the last is at the boundary."""
    if stage == 2 and releases.LOSES_MICRO_STEPS:
        pytest.skip(f"stock {releases.RELEASE} loses micro steps of ZeRO-2")
    for result in world.run(cases.stock_with_boundaries, stage):
        assert result.equal(), result


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_experts(world: World, stage: int, ep_size: int) -> None:
    for difference, moved in world.run(experts.against_boundaries, stage, ep_size):
        assert difference <= cases.EXACT < 1e-3 < moved


@pytest.mark.core_case(style="engine", stage=3)
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_over_each_forward_with_zero3_retain(
    world: World, stage: int, style: str
) -> None:
    releases.needs_torch_style(style)
    for result in world.run(cases.with_zero3_retain, stage, style):
        assert result.equal(), result
        assert not result.heard


#: Several windows of one step, and its micro steps.
SEVERAL = [
    (micro_steps.two_windows, 2),
    (micro_steps.two_windows_before_one_step, 1),
    (micro_steps.windows_among_micro_steps, 3),
]


@pytest.mark.core_case(script=micro_steps.two_windows, stage=2)
@pytest.mark.core_case(script=micro_steps.two_windows, stage=3, settings={})
@pytest.mark.core_case(script=micro_steps.windows_among_micro_steps, stage=2)
@by_settings_and_flush
@pytest.mark.parametrize(
    ("script", "gas"), [pytest.param(*one, id=one[0].__name__) for one in SEVERAL]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_adds_to_what_its_step_has_reduced(
    world: World,
    stage: int,
    script: cases.Script,
    gas: int,
    settings: dict[str, Any],
    flush: str,
) -> None:
    case: Any = {"micro_steps": gas, "settings": settings, "flush": flush}
    for result in world.run(micro_steps.outcome, script, stage=stage, **case):
        assert result.equal(), result
        assert not result.heard
