"""Each benchmark runs, small and on CPU, and prints all of its rows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import shell

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
#: What starts it, and the rows of one comparison.
BENCHMARKS = {
    "at_rest": (TORCHRUN, ["stock", "patched", "stock again"]),
    "coalesce": (TORCHRUN, ["native", "multi", "patched"]),
    "retain": (TORCHRUN, ["patched, two losses", "stock, two forwards"]),
    "dc_fallback": ((), ["eager, loss"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs(name: str) -> None:
    launcher, rows = BENCHMARKS[name]
    command = [sys.executable, "-m", *launcher, f"benchmarks.{name}", "--rounds", "2"]
    done = subprocess.run(
        command, cwd=shell.REPOSITORY, env=shell.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("| --- |")[2].splitlines()[1:]
    found = [line.split(" | ") for line in table]
    assert {row for row in rows if any(cells[1].startswith(row) for cells in found)} == {*rows}
    assert all(len(cells[3].split()) == 2 for cells in found), "a round is missing"
