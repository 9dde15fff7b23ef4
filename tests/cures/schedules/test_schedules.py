"""Schedules of DeepSpeed's against what they say they do."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_patches import schedules
from tests.harness.run import applied
from tests.harness.stock import RELEASE, Version, up_to

RATES = (0.1, 0.01)
ONE_RATE = Version("0.17.2") <= RELEASE <= Version("0.19.3")
pytestmark = [pytest.mark.core_case, up_to("0.19.3")]


def rates(name: str, steps: int, *arguments: Any, **more: Any) -> list[list[float]]:
    """Return the rates of both groups before each step."""
    from deepspeed.runtime import lr_schedules

    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in RATES]
    optimizer = torch.optim.SGD(groups)
    schedule = getattr(lr_schedules, name)(optimizer, *arguments, **more)
    all_rates = []
    for _ in range(steps):
        all_rates.append([float(group["lr"]) for group in optimizer.param_groups])
        schedule.step()
    return all_rates


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with applied("schedules"):
        assert schedules.is_applied()
        yield


@pytest.mark.skipif(not ONE_RATE, reason="the greatest rate has to be given")
@pytest.mark.parametrize(
    ("arguments", "more"),
    [((), {}), ((), {"warmup_min_lr": 0.0}), ((0.0,), {}), ((0.0, None, 4), {})],
    ids=str,
)
def test_warmup(arguments: Any, more: Any) -> None:
    if len(arguments) < 3:
        more = {**more, "warmup_num_steps": 4}
    actual = rates("WarmupLR", 6, *arguments, **more, warmup_type="linear")
    warmed = [min(1, max(0, step) / 4) for step in range(-1, 5)]
    assert actual == [pytest.approx([r * part for r in RATES]) for part in warmed]


@pytest.mark.skipif(not ONE_RATE, reason="the greatest rate has to be given")
@pytest.mark.parametrize("greatest", [0.5, [0.5, 0.2]])
def test_what_is_given_stays(greatest: Any) -> None:
    *_, last = rates("WarmupLR", 4, 0.0, greatest, 2)
    assert last == [0.5, 0.5] if greatest == 0.5 else [0.5, 0.2]


@up_to("0.18.9")
def test_cosine_begins_at_zero() -> None:
    assert rates("WarmupCosineLR", 1, 10, warmup_num_steps=4) == [[0.0, 0.0]]


@up_to("0.19.2")
def test_cosine_ends() -> None:
    total, warm, least = 8, 2, 0.001
    actual = [
        first for first, _ in rates("WarmupCosineLR", 14, total, 0.0, warm, least, "linear")[3:]
    ]
    reach = [min(1.0, (step - warm + 1) / (total - warm)) for step in range(warm, warm + 11)]
    wanted = [0.1 * (least + (1 - least) * (1 + math.cos(math.pi * part)) / 2) for part in reach]
    assert actual == pytest.approx(wanted)


@up_to("0.19.2")
def test_nothing_to_decay() -> None:
    *_, last = rates("WarmupCosineLR", 6, 4, warmup_num_steps=4)
    assert last == pytest.approx([rate * 0.0001 for rate in RATES])
