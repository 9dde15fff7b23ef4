"""The race detector finds what it is for, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.stream_safety.clocks import Device, Stream
from tests.stream_safety.races import Detector, detecting


@pytest.fixture
def found() -> Iterator[tuple[Device, Detector]]:
    with detecting() as (device, detector), detector:
        yield device, detector


def test_a_read_that_does_not_wait(found: tuple[Device, Detector]) -> None:
    device, detector = found
    x = torch.ones(4)
    with device.on(Stream(name="side")):
        y = x * 2  # noqa: F841
    (race,) = detector.races
    assert race.endswith("on default, then read by aten::mul on side")


def test_a_read_that_waits(found: tuple[Device, Detector]) -> None:
    device, detector = found
    x, side = torch.ones(4), Stream()
    side.wait_stream(device.default)
    with device.on(side):
        y = x * 2  # noqa: F841
    assert not detector.races


def test_other_parts_of_a_tensor(found: tuple[Device, Detector]) -> None:
    device, detector = found
    x, side = torch.ones(4), Stream()
    side.wait_stream(device.default)
    with device.on(side):
        x[:2].mul_(2)
    x[2:].mul_(3)
    assert not detector.races
    x[1:].mul_(3)
    assert detector.races


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_it_is_read(
    found: tuple[Device, Detector], recorded: bool
) -> None:
    device, detector = found
    x, side = torch.ones(4), Stream(name="side")
    side.wait_stream(device.default)
    with device.on(side):
        y = x * 2  # noqa: F841
    if recorded:
        x.record_stream(side)
    del x
    torch.ones(4)
    assert bool(detector.races) != recorded
    assert all("freed for default" in race for race in detector.races)


def test_what_the_host_waits_for(found: tuple[Device, Detector]) -> None:
    device, detector = found
    with device.on(Stream()):
        total = torch.ones(4).sum()
        total.item()
    total += 1
    assert not detector.races
