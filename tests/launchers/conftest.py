"""Fixtures of the launches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launchers import launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the user's folder, to launch in, with an empty one for the ranks' reports."""
    copied = Path(shutil.copytree(Path(__file__).with_name("user"), tmp_path / "user"))
    (copied / launch.REPORTS).mkdir()
    return copied
