"""The demo is what a newcomer runs first: stock crashes there, and patched trains."""

from __future__ import annotations

from tests import shell


def test_stock_crashes_and_patched_trains() -> None:
    done = shell.python("-m", "examples.two_losses")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "stock:   RuntimeError: The size of tensor a (0) must match" in done.stdout
    assert "stock is wrong, patched is right" in done.stdout
