"""What the race detector finds on no release, or would find where nothing is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.stream_safety.clocks import Stream
from tests.stream_safety.races import detecting


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_it_is_read(recorded: bool) -> None:
    with detecting() as (device, detector), detector:
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


def test_what_the_host_waits_for() -> None:
    with detecting() as (device, detector), detector:
        with device.on(Stream()):
            total = torch.ones(4).sum()
            total.item()
        total += 1
    assert not detector.races
