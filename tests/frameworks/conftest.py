"""Ranks for the scripts: of stock, patched from outside, and one alone; and the models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_patches.startup import variables
from tests.world import World


@pytest.fixture(scope="package")
def stock() -> Iterator[World]:
    with World() as living:
        yield living


@pytest.fixture(scope="package")
def patched() -> Iterator[World]:
    """By the start-up hook, as `python -m ds_patches run` starts them."""
    with World(variables=variables.of_program(os.environ)) as living:
        yield living


@pytest.fixture(scope="package")
def alone() -> Iterator[World]:
    """One process."""
    with World(1) as living:
        yield living
