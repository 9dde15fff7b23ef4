"""Muon against Muon of one device, which has the whole gradient of a step."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness import ALL_REDUCED, BF16_SUMS, OFFLOADED, Options, World, models, on_ranks, stock
from tests.harness.run import Outcome, applied, run
from tests.harness.stock import LOSES_MICRO_STEPS, RELEASE, Version, up_to
from tests.scripts.losses import two_backwards
from tests.scripts.ordinary import micro_steps, one_backward, skipped_step
from tests.scripts.windows import window

IS_RIGHT = Version("0.19.8") <= RELEASE  # but for two backwards
FP16 = {"settings": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}}


class Square(models.TwoHeads):
    """All matrices of Muon's have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))
        self.embedded = self.classify
        del self.classify

    def heads(self, x: torch.Tensor) -> models.Losses:
        return models.Losses(self.embedded(x), self.rebuild(x))


def is_right(found: Outcome, options: Options) -> bool:
    """Orthogonalising makes much of rounding: the iteration is in half precision."""
    rounding = 0.3 if options.settings else 0.4 if options.sums else 0.05
    return not found.error and found.difference < rounding * found.moved


since = partial(stock.since, what="the defect")
pytestmark = [pytest.mark.core_case, since("0.17.6")]
ZERO3 = since("0.18.9")


def case(*marks: Any, script: Any = one_backward, **given: Any) -> Any:
    options = Options(muon=True, **given)
    said = [f"ZeRO-{options.stage}", script.name, *options.shows]
    return pytest.param(script, options, marks=marks, id=" ".join(said))


@pytest.mark.parametrize(
    ("script", "options"),
    [
        case(up_to("0.19.6"), stage=0),
        case(up_to("0.19.6"), stage=0, **FP16),
        case(up_to("0.19.2"), stage=1),
        case(up_to("0.19.2"), stage=2),
        case(since("0.19.7"), stage=2),
        case(up_to("0.18.4"), stage=1, **BF16_SUMS),
        case(stage=1, **FP16),
        case(stage=2, **FP16),
        case(stage=2, steps=6, script=skipped_step, **FP16),
        case(ZERO3, stage=3, **ALL_REDUCED),
        case(ZERO3, stage=3, **ALL_REDUCED, **FP16),
        case(ZERO3, stage=3, steps=6, script=skipped_step, **ALL_REDUCED, **FP16),
        case(ZERO3, stage=3, script=micro_steps, micro_steps=2, **ALL_REDUCED),
        case(ZERO3, stage=3, script=micro_steps, micro_steps=2, **ALL_REDUCED, **OFFLOADED),
        case(ZERO3, stage=3, script=micro_steps, micro_steps=2, **ALL_REDUCED, **OFFLOADED, **FP16),
    ],
)
def test_muon(world: World, script: Any, options: Options) -> None:
    for one in world.run(run, script, options):
        assert IS_RIGHT or one.error or one.difference > 0.4 * one.moved, one
    for one in world.run(run, script, options, "muon"):
        assert is_right(one, options), one
        assert not one.said, one.said


@on_ranks
@ZERO3
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_each_micro_step_is_orthogonalised(patch: bool) -> None:
    """In silence, where all matrices have one shape."""
    options = Options(3, Square, micro_steps=2, muon=True, **ALL_REDUCED)
    found = run(micro_steps, options, *["muon"] * patch)
    assert not found.error
    assert is_right(found, options) == (patch or IS_RIGHT)


@on_ranks
@pytest.mark.skipif(not LOSES_MICRO_STEPS, reason="stock is right")
def test_micro_steps_of_zero2() -> None:
    """The last one counts, which accumulation cures for every optimizer."""
    options = Options(2, micro_steps=2, muon=True)
    found = run(micro_steps, options, "accumulation", "muon")
    assert is_right(found, options), found


FP32_SUMS = [since("0.18.5"), up_to("0.19.6")]


@on_ranks
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            Options(2, muon=True, **ALL_REDUCED, **OFFLOADED), marks=up_to("0.19.7"), id="offloaded"
        ),
        pytest.param(Options(1, muon=True, **BF16_SUMS), marks=FP32_SUMS, id="fp32 sums"),
        pytest.param(Options(3, muon=True), marks=up_to("0.18.8"), id="ZeRO-3"),
    ],
)
def test_what_is_not_cured_is_said(options: Options) -> None:
    found = run(one_backward, options, "muon")
    assert not is_right(found, options)
    assert any("Muon is plain SGD" in line for line in found.said), found


@on_ranks
def test_two_backwards_without_the_patch() -> None:
    found = run(two_backwards, Options(2, muon=True), "accumulation")
    assert found.error.startswith("Refused: a second backward"), found


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=ZERO3)])
@pytest.mark.parametrize("script", [two_backwards, window])
def test_several_backwards(world: World, script: Any, stage: int) -> None:
    """What is orthogonalised is their sum."""
    options = Options(stage, muon=True, **ALL_REDUCED)
    for one in world.run(run, script, options) if script is two_backwards else ():
        assert one.error or one.difference > 0.4 * one.moved, one
    for one in world.run(run, script, options, "coalesce", "zero3_retain", "muon"):
        assert is_right(one, options), one


@on_ranks
@ZERO3
@up_to("0.19.6")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_matrices_of_zero_init(patch: bool) -> None:
    with applied(*["muon"] * patch):
        with deepspeed.zero.Init(config_dict_or_path=Options(3).config):
            model = models.build("TwoHeads")
        deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon"), model)
        matrices = {name for name, param in model.named_parameters() if param.use_muon}
    assert ("blocks.0.up.weight" in matrices) == patch
    assert not {"embed.weight", "blocks.0.up.bias"} & matrices
