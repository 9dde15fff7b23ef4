"""Two ranks on two GPUs: fresh for each test, or as long as the session lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.world import World


@pytest.fixture(scope="session")
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def gpus(two_gpus: None) -> Iterator[World]:
    """A world that no test has touched, one GPU for each of its two ranks."""
    with World(accelerator="cuda") as own:
        yield own


@pytest.fixture(scope="session")
def living_gpus(two_gpus: None) -> Iterator[World]:
    """The same, that all tests share: to start one takes longer than most of them."""
    with World(accelerator="cuda") as living:
        yield living
