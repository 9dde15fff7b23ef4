"""Ranks for the scripts: of stock, patched from outside, and one alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


@pytest.fixture(scope="package")
def ranks_on(offline: None) -> Iterator[Callable[[str], Ranks]]:
    """Start ranks of an older release, which `make frameworks` installs; "": of the newest.

    They are patched by the start-up hook, as `python -m ds_patches run` starts them.
    """
    with ExitStack() as living:

        def start(release: str) -> Ranks:
            missing = release and not releases.place(release).is_dir()
            assert not missing, f"python -m tools.releases install {release}"
            own = environment(release) if release else {}
            hooked = {**own, **command.variables({**os.environ, **own})}
            worlds = World(variables=own), World(variables=hooked), World(1)
            return Ranks(*map(living.enter_context, worlds))

        yield cache(start)


@pytest.fixture(scope="package")
def ranks(ranks_on: Callable[[str], Ranks]) -> Ranks:
    return ranks_on("")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("framework")
