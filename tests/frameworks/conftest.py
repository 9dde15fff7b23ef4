"""Ranks for the scripts: of stock, patched from outside, and one alone."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from ds_patches.startup import command
from tests.world import World
from tools import releases
from tools.releases.run import environment

#: No script asks for what is not here.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="package", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    caches = {"HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    with mock.patch.dict(os.environ, OFFLINE | caches):
        yield


class Ranks(NamedTuple):
    """Two without patches, two with them, and one process whose batches are those of both ranks."""

    stock: World
    patched: World
    alone: World


@contextmanager
def started(own: Mapping[str, str]) -> Iterator[Ranks]:
    """Patched by the start-up hook, as `python -m ds_patches run` starts them.

    own: variables beside those of this process.
    """
    hooked = {**own, **command.variables({**os.environ, **own})}
    worlds = World(variables=own), World(variables=hooked), World(1)
    with worlds[0], worlds[1], worlds[2]:
        yield Ranks(*worlds)


@pytest.fixture(scope="package")
def ranks_on(offline: None) -> Iterator[Callable[[str], Ranks]]:
    """Start ranks of an older release, which `make frameworks` installs; "": of the newest."""
    with ExitStack() as living:

        def start(release: str) -> Ranks:
            if not release:
                return living.enter_context(started({}))
            assert releases.place(release).is_dir(), f"python -m tools.releases install {release}"
            return living.enter_context(started(environment(release)))

        yield cache(start)


@pytest.fixture(scope="package")
def ranks(ranks_on: Callable[[str], Ranks]) -> Ranks:
    return ranks_on("")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("framework")
