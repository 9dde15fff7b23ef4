"""Each benchmark runs, small and on CPU, and prints its rows."""

import pytest

from tests import shell

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
LAUNCHERS = {"at_rest": TORCHRUN, "coalesce": TORCHRUN, "retain": TORCHRUN, "gather_once": TORCHRUN}
LAUNCHERS["dc_fallback"] = ()  # it starts its own ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_runs(name: str) -> None:
    done = shell.python("-m", *LAUNCHERS[name], f"benchmarks.{name}", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    _, *rows = done.stdout.partition("| --- |")[2].splitlines()
    assert rows
    assert all(len(row.split(" | ")[4].split()) == 2 for row in rows), "a round is missing"
