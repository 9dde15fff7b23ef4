"""Fixtures of the launches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import hosts, launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the user's folder, to launch in."""
    return launch.user_folder(tmp_path)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[hosts.Host]]:
    """Two hosts, gone after the test with all that runs there."""
    if reason := hosts.impossible():
        pytest.skip(f"this machine cannot be two hosts: {reason}")
    with hosts.pair(tmp_path) as both:
        yield both
