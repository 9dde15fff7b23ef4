"""Patched, each model ends where plain PyTorch does; another one on each release, in turn."""

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.models.trained import WORK, is_right, told
from tests.models.zoo import MODELS
from tests.world import World
from tools.releases import RELEASES, this_turn

ITS_TURN = [*MODELS][(this_turn(len(MODELS)) + RELEASES.index(version("deepspeed"))) % len(MODELS)]


@pytest.fixture(scope="module")
def patched() -> Iterator[World]:
    """Ranks that stay patched."""
    with World() as ranks:
        yield ranks


@pytest.mark.exhaustive
@pytest.mark.core_case(name=ITS_TURN)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_ends_where_plain_pytorch_does(patched: World, name: str) -> None:
    for work, task in WORK.items():
        for stage in task.stages:
            far = told(patched, name, work, stage, True)
            assert is_right(far), (work, stage, far)
