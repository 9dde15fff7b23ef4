"""Fixtures of the core's tests."""

from pathlib import Path

import pytest

from tests.core import fake


@pytest.fixture
def place(tmp_path: Path) -> fake.Place:
    """The sample patch, and a DeepSpeed that it may be applied to."""
    return fake.Place(tmp_path, "sample")


@pytest.fixture
def two(tmp_path: Path) -> fake.Place:
    """Two patches that wrap the same functions."""
    return fake.Place(tmp_path, "lower", "upper")
