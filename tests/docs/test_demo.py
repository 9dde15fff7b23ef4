"""The demo is what a newcomer runs first: stock crashes there, and patched trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.shell import REPOSITORY


@pytest.mark.exhaustive
def test_stock_crashes_and_patched_trains() -> None:
    command = [sys.executable, "-m", "examples.two_losses"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "stock:   RuntimeError: The size of tensor a (0) must match" in done.stdout
    assert "stock is wrong, patched is right" in done.stdout
