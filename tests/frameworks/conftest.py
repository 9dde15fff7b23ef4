"""Ranks for the scripts: of stock, patched from outside, and one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_patches.startup import variables
from tests import releases
from tests.releases.run import environment
from tests.world import World

#: An old release, on which stock loses micro steps; `make frameworks` installs it.
OLD = "0.18.2"
#: No script asks for what is not here.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="package", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    caches = {"HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (OFFLINE | caches).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="package")
def unpatched(offline: None) -> Iterator[World]:
    with World() as living:
        yield living


@pytest.fixture(scope="package")
def patched(offline: None) -> Iterator[World]:
    """By the start-up hook, as `python -m ds_patches run` starts them."""
    with World(variables=variables.of_program(os.environ)) as living:
        yield living


@pytest.fixture(scope="package")
def alone(offline: None) -> Iterator[World]:
    """One process, whose batches are those of both ranks."""
    with World(1) as living:
        yield living


class Ranks(NamedTuple):
    """Without patches and with them."""

    stock: World
    patched: World


@pytest.fixture(scope="package")
def old_ranks(offline: None) -> Iterator[Ranks]:
    assert releases.place(OLD).is_dir(), f"python -m tests.releases install {OLD}"
    own = environment(OLD)
    with World(variables=own) as stock, World(variables=own | variables.of_program(own)) as patched:
        yield Ranks(stock, patched)


@pytest.fixture
def new_ranks(unpatched: World, patched: World) -> Ranks:
    return Ranks(unpatched, patched)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("framework")
