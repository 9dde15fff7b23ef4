"""Each benchmark runs, small and on CPU, and prints its rows."""

import pytest

from tests import shell

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
GATHERED_ONCE = "at_rest --patches zero3_gather_once --stages 3 --models checkpointing --tokens 2x8"
LAUNCHERS = dict.fromkeys(["at_rest", GATHERED_ONCE, "coalesce", "retain"], TORCHRUN)
LAUNCHERS["dc_fallback"] = ()  # it starts its own ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_runs(name: str) -> None:
    done = shell.python("-m", *LAUNCHERS[name], *f"benchmarks.{name}".split(), "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    _, *rows = done.stdout.partition("| --- |")[2].splitlines()
    assert rows
    assert all(len(row.split(" | ")[4].split()) == 2 for row in rows), "a round is missing"
