"""Two ranks on two GPUs, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.world import World


@pytest.fixture
def gpus() -> Iterator[World]:
    """A world that no test has touched, one GPU for each of its two ranks."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with World(accelerator="cuda").fresh() as own:
        yield own
