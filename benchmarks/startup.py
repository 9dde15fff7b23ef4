"""The start-up hook, measured: ``python -m benchmarks.startup [options]``.

Milliseconds of CPU time that the hook adds to the start of an interpreter, that auto-apply adds to
`import deepspeed`, and of calls of the API where DeepSpeed is imported already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple

import torch

from benchmarks.options import positive
from benchmarks.provenance import ROOT, provenance
from benchmarks.tables import markdown
from benchmarks.timing import quartiles
from ds_patches.startup import variables

#: What a hook may add to the start of an interpreter.
_UNSET_BAR, _SET_BAR = 2.0, 10.0
#: Calls in one process, in their order, and what each may take.
_CALLS = {"apply_all()": 350.0, "unapply_all()": None, "apply_all(), the second time": 150.0}

_IMPORT = "import deepspeed"
_CALL = f"{_IMPORT}, ds_patches; ds_patches.apply_all()"
# Assertions on what a start is called, for a run that is not timed.
_HOOKED = "import sys; assert ('ds_patches.startup' in sys.modules) is {}"
_LIVE = "import ds_patches; assert any(s.live for s in ds_patches.status().values()) is {}"
_TIMED = """
import json, time
import deepspeed, ds_patches

taken = []
for name, live in (("apply_all", True), ("unapply_all", False), ("apply_all", True)):
    cpu = time.process_time()
    statuses = getattr(ds_patches, name)()
    taken.append(1e3 * (time.process_time() - cpu))
    assert any(status.live for status in statuses.values()) is live, statuses
print(json.dumps(taken))
"""


class Start(NamedTuple):
    """One way to start this interpreter, with the hook on its path or without.

    check: what holds there, an assertion.
    bar: what it may add to the first start of its table.
    """

    name: str
    variables: Mapping[str, str]
    code: str
    check: str
    bar: float | None = None

    def once(self, check: str = "") -> float:
        """Start it and wait for its end; its CPU time."""
        before = getrusage(RUSAGE_CHILDREN)
        words = [sys.executable, "-c", f"{self.code}\n{check}"]
        streams = {"stdout": subprocess.DEVNULL, "stderr": None if check else subprocess.DEVNULL}
        subprocess.run(words, env=self.variables, check=True, **streams)
        after = getrusage(RUSAGE_CHILDREN)
        return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    """Measure and print, whether or not the bars held."""
    parser = argparse.ArgumentParser(prog="benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=200, help="of bare starts")
    parser.add_argument("--imports", type=positive, default=20, help=f"rounds of `{_IMPORT}`")
    options = parser.parse_args()
    origin = provenance(torch.device("cpu"), None)
    print(", ".join(f"{key} {value}" for key, value in origin.items()), flush=True)
    bare, hooked, wanted = _variables(), _variables(variables.HOOK), {"DS_PATCHES": "all"}
    starts = [
        Start("no hook", bare, "pass", _HOOKED.format(False)),
        Start("DS_PATCHES unset", hooked, "pass", _HOOKED.format(False), _UNSET_BAR),
        Start("DS_PATCHES=all", hooked | wanted, "pass", _HOOKED.format(True), _SET_BAR),
    ]
    _compare("python -c pass", starts, options.rounds)
    starts = [
        Start("DS_PATCHES unset", hooked, _IMPORT, _LIVE.format(False)),
        Start("DS_PATCHES=all", hooked | wanted, _IMPORT, _LIVE.format(True)),
        Start("unset, apply_all() in the script", hooked, _CALL, _LIVE.format(True)),
    ]
    _compare(f"python -c '{_IMPORT}'", starts, options.imports)
    _calls(options.imports)


def _variables(*first: Path) -> dict[str, str]:
    """This shell's, but for those that change what Python does, or what we do.

    first: on the path before this project, and what this shell has on its path.
    """
    ours = ("PYTHON", "DS_PATCHES")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return plain | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def _compare(what: str, starts: Sequence[Start], rounds: int) -> None:
    """Each start once per round, A B C, C B A, A B C ...: drift of the machine meets all alike.

    Prints what each took, and what it took beyond the first one's in the same round.
    """
    for start in starts:  # which also compiles what is not compiled yet
        start.once(start.check)
    taken: dict[str, list[float]] = {start.name: [] for start in starts}
    turn = list(starts)
    for _ in range(rounds):
        for start in turn:
            taken[start.name].append(start.once())
        turn.reverse()
    first = taken[starts[0].name]
    body = []
    for start in starts:
        ms = taken[start.name]
        added = [one - other for one, other in zip(ms, first, strict=True)]
        cells = ["-"] * 4 if ms is first else _cells(added, start.bar)
        body.append([start.name, f"{statistics.median(ms):.2f}", *cells])
    header = (what, "CPU ms", "added CPU ms", "quartiles", "bar", "held")
    print("", markdown(header, body), sep="\n", flush=True)


def _calls(processes: int) -> None:
    """What each call takes; the first process has compiled what was not compiled yet."""
    words = [sys.executable, "-c", _TIMED]
    taken = []
    for _ in range(processes + 1):
        done = subprocess.run(
            words, env=_variables(), stdout=subprocess.PIPE, text=True, check=True
        )
        taken.append(json.loads(done.stdout.splitlines()[-1]))
    by_call = zip(_CALLS.items(), zip(*taken[1:], strict=True), strict=True)
    body = [[name, *_cells(ms, bar)] for (name, bar), ms in by_call]
    header = ("import deepspeed, then", "CPU ms", "quartiles", "bar", "held")
    print("", markdown(header, body), sep="\n", flush=True)


def _cells(ms: Sequence[float], bar: float | None) -> list[str]:
    low, median, high = quartiles(ms)
    cells = [f"{median:.2f}", f"{low:.2f} to {high:.2f}"]
    held = ["-", "-"] if bar is None else [f"< {bar:g}", "yes" if median < bar else "NO"]
    return cells + held


if __name__ == "__main__":
    main()
