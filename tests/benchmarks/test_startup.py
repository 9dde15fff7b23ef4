"""benchmarks.startup: a small run, which checks by itself that each start is what it is called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks import ROOT, table

BARS = [("no hook", "-"), ("DS_PATCHES unset", "< 2"), ("DS_PATCHES=all", "< 10")]


@pytest.mark.exhaustive
def test_startup_prints_every_start_call_and_bar() -> None:
    command = [sys.executable, "-m", "benchmarks.startup", "--rounds", "3", "--imports", "1"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    bare = table(done.stdout, "python -c pass")
    assert all(float(cells[1]) > 0 for cells in bare)
    assert [(cells[0], cells[4]) for cells in bare] == BARS
    imports = table(done.stdout, "python -c 'import deepspeed'")
    assert [cells[0] for cells in imports][:2] == ["DS_PATCHES unset", "DS_PATCHES=all"]
    assert float(imports[0][1]) > 10 * float(bare[0][1]), "DeepSpeed was imported"
    calls = table(done.stdout, "import deepspeed, then")
    names = [cells[0].partition("()")[0] for cells in calls]
    assert names == ["apply_all", "unapply_all", "apply_all"]
    assert [cells[3] for cells in calls] == ["< 350", "-", "< 150"]
    assert float(calls[0][1]) > float(calls[2][1]), "the shapes are known, nothing is imported"
