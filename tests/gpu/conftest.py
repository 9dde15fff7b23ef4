"""Two ranks on two GPUs, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.world import World


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world that no test has touched, one GPU for each of its two ranks."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # Streams that share one of the device's queues, of which there are 8, wait for each other by
    # accident, and hide a race.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with World(accelerator="cuda").fresh() as own:
        yield own
