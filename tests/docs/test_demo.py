"""The demo is what a newcomer runs first: stock crashes there, and patched trains."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.shell import REPOSITORY


@pytest.mark.exhaustive
def test_stock_crashes_and_patched_trains() -> None:
    command = [sys.executable, "-m", "examples.two_losses", "--epochs", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    table = done.stdout.partition("\nSide by side\n")[2]
    assert re.search(r"^trains +no +yes$", table, re.M)
    assert re.search(r"^error +The size of tensor a \(0\) must match\.\.\. +none$", table, re.M)
    assert re.search(r"^gradient difference to PyTorch +- +\d\.\de-\d\d$", table, re.M)
