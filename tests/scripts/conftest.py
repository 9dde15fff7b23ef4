"""The processes of all scripts, for as long as one of them is to run."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.scripts.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with closing(Worlds()) as started:
        yield started
