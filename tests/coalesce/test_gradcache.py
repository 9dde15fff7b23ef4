"""The example: GradCache under ZeRO has the loss curve of the whole batch in plain PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from tests.releases import ROOT
from tests.training import stock
from tests.training.run import applied
from tests.world import World

CHUNKS = 4


def curves(stage: int, windows: bool) -> tuple[Any, Any]:
    """Those of plain PyTorch and of an engine."""
    from examples.gradcache import curves

    work = curves.Work(steps=12, chunks=CHUNKS)
    with applied("coalesce") if windows else nullcontext():
        return curves.full_batch(work), curves.cached(stage, work, windows=windows)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loss_curve_is_that_of_the_whole_batch(world: World, stage: int) -> None:
    for plain, found in world.run(curves, stage, True):
        assert not found.error
        assert found.losses == pytest.approx(plain.losses, abs=1e-5)
        assert found.losses[-1] < 0.8 * found.losses[0]
        assert found.reductions == {1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stock_has_another_curve_or_reduces_every_backward(world: World, stage: int) -> None:
    for plain, found in world.run(curves, stage, False):
        if found.error:
            assert not stock.TORCH_STYLE, found.error
            continue
        if stage == 3:
            assert found.losses == pytest.approx(plain.losses, abs=1e-5)
        else:
            assert found.off(plain) > 0.1
        assert found.reductions == {CHUNKS}


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not stock.TORCH_STYLE,
    reason="below 0.18.3 stock raises at ZeRO-1 and 2, so the example has no rows of it",
)
def test_the_command() -> None:
    command = [sys.executable, "-m", "examples.gradcache", "--steps", "4"]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    number = r"\d\.\d{4}"
    row = rf"^ZeRO-%s, %s +(\d+)(?:  {number}){{4}} +(\d\.\de[+-]\d\d)$"
    for stage in (1, 2, 3):
        for way, reductions in (("stock", "8"), ("one block", "1")):
            found = re.search(row % (stage, way), done.stdout, re.M)
            assert found, done.stdout
            assert found[1] == reductions
            right = way == "one block" or stage == 3
            assert (float(found[2]) < 1e-5) == right, done.stdout
