"""Ranks for DeepCompile alone: it changes Dynamo for the rest of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    living = World()
    yield living
    living.close()
