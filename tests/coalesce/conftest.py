"""Fixtures of the flat reductions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.world import World


@pytest.fixture(scope="package")
def three() -> Iterator[World]:
    """Three ranks: divisors that are no power of two, partitions that end in odd places."""
    with World(3) as living:
        yield living
