"""The demo is what a newcomer runs first: it must run, and say what it found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
def test_stock_crashes_and_patched_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--epochs", "1"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert done.stderr == ""
    assert max(map(len, shown.splitlines())) <= 80
    assert "\r" not in shown  # no progress bar where nobody watches
    assert "RuntimeError in epoch 1, step 1, second backward:\n" in shown
    assert "The size of tensor a (0) must match the size of tensor b" in shown
    assert "zero3_retain: applied" in shown

    _, _, table = shown.partition("\nSide by side\n")
    assert re.search(r"^ +stock +patched$", table, re.M)
    assert re.search(r"^trains +no +yes$", table, re.M)
    assert re.search(r"^error +The size of tensor a \(0\) must +none$", table, re.M)
    assert re.search(r"^gradient difference to PyTorch +- +\d\.\de-\d\d$", table, re.M)
    assert re.search(r"^gathered after retained backward +\d+ of 22 +0 of 22$", table, re.M)
    assert re.search(r"^test accuracy +- +\d\d\.\d%$", table, re.M)
    assert re.search(r"^seconds per epoch +- +\d+\.\d\d$", table, re.M)
    assert "ds_patches.apply_all()" in table.splitlines()[-1]
