"""Two ranks on two GPUs, or on the only one: fresh for each test, or for the whole session."""

from collections.abc import Iterator

import pytest
import torch

from tests.world import World


@pytest.fixture(scope="session")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture
def gpus(gpu: None) -> Iterator[World]:
    """A world of two ranks that no test has touched."""
    with World(accelerator="cuda") as own:
        yield own


@pytest.fixture(scope="session")
def living_gpus(gpu: None) -> Iterator[World]:
    """The same, that all tests share: to start one takes longer than most of them."""
    with World(accelerator="cuda") as living:
        yield living
