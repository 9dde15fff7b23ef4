"""Ranks for DeepCompile alone: it changes Dynamo for the rest of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dc_fallback import releases
from tests.world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    if not releases.has_deepcompile():
        pytest.skip("no DeepCompile before 0.16.6")
    with World() as living:
        yield living
