"""The start-up hook, measured: ``python -m benchmarks.startup [options]``.

What the hook adds to the start of an interpreter, what auto-apply adds to `import deepspeed`, and
what calls of the API take where DeepSpeed is imported already.
Prints Markdown and, with ``--json``, keeps everything behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import ds_patches
from benchmarks.options import of_any_run, positive, write
from benchmarks.provenance import provenance
from benchmarks.tables import markdown
from benchmarks.timing import Spread
from ds_patches.startup import variables

_ROOT = Path(__file__).resolve().parents[1]
#: Milliseconds of CPU time that a hook may add to the start of an interpreter.
_UNSET_BAR, _SET_BAR = 2.0, 10.0
_ALL = {"DS_PATCHES": "all"}
#: Calls in one process, in their order, and the CPU time that each may take in milliseconds.
_CALLS = {"apply_all()": 350.0, "unapply_all()": None, "apply_all(), the second time": 150.0}

#: Fields of Taken.
_KINDS = ("cpu", "wall")

_NOTHING = "pass"
_IS_HOOKED = (
    "import sys; "
    "print(any(p.endswith('hook') for p in sys.path), 'ds_patches.startup' in sys.modules)"
)
_IMPORT = "import deepspeed"
_CALL = f"{_IMPORT}, ds_patches; ds_patches.apply_all(); "
_IS_LIVE = "import deepspeed, ds_patches; print(any(s.live for s in ds_patches.status().values()))"
_TIMED = """
import json, time
import deepspeed, ds_patches

def timed(name, live):
    wall, cpu = time.perf_counter(), time.process_time()
    statuses = getattr(ds_patches, name)()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert any(status.live for status in statuses.values()) is live, statuses
    return {"wall": wall * 1e3, "cpu": cpu * 1e3}

print(json.dumps([timed("apply_all", True), timed("unapply_all", False), timed("apply_all", True)]))
"""


@dataclass(frozen=True)
class Taken:
    """Milliseconds: by the clock, and of CPU time in user and kernel mode."""

    wall: float
    cpu: float


@dataclass
class Start:
    """One way to start an interpreter, and what it took, by round.

    question: a program that shows whether this start is what its name says; it has to print
        `answer` as its last line.
    bar: how much CPU time it may add to the first start of its table.
    """

    name: str
    python: Path
    variables: Mapping[str, str]
    code: str
    question: str
    answer: str
    bar: float | None = None
    taken: list[Taken] = field(default_factory=list)

    def verify(self) -> None:
        words = [self.python, "-c", self.question]
        done = subprocess.run(words, env=self.variables, stdout=subprocess.PIPE, text=True)
        if done.stdout.splitlines()[-1:] != [self.answer]:
            raise RuntimeError(f"{self.name}: {self.question!r} printed {done.stdout!r}")

    def once(self) -> Taken:
        """Start it and wait for its end."""
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
        words = [str(self.python), "-c", self.code]
        begin = time.perf_counter()
        child = os.posix_spawn(words[0], words, self.variables, file_actions=quiet)
        _, status, usage = os.wait4(child, 0)
        wall = time.perf_counter() - begin
        if status:
            raise RuntimeError(f"{self.name}: exit code {os.waitstatus_to_exitcode(status)}")
        return Taken(wall * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3)


def main() -> int:
    """Measure and print; 0 if everything ran, whether or not the bars held."""
    options = _parse()
    origin = provenance(torch.device("cpu"), options.commit)
    print(", ".join(f"{key} {value}" for key, value in origin.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bare = _bare_starts(Path(folder))
        _in_turn(bare, options.rounds)
    imports = _imports()
    _in_turn(imports, options.imports)
    for what, starts in (("python -c pass", bare), (f"python -c '{_IMPORT}'", imports)):
        print("", _table(what, starts), "", _bars(starts), sep="\n", flush=True)
    calls = _calls(options.imports)
    print("", _table_of_calls(calls), sep="\n", flush=True)
    measured = [_plain(one) for one in (*bare, *imports)]
    plain = {name: [asdict(one) for one in taken] for name, taken in calls.items()}
    write(options.json, {"provenance": origin, "starts": measured, "calls": plain})
    return 0


def _bare_starts(folder: Path) -> list[Start]:
    """Of an interpreter that has ds_patches, and a program that does nothing."""
    plain, plain_site = _environment(folder / "plain")
    enabled, _ = _environment(folder / "enabled")
    enable = "from ds_patches.startup import site_packages; site_packages.enable()"
    subprocess.run([enabled, "-c", enable], env=_variables(), check=True)
    hook = {"PYTHONPATH": str(plain_site / "ds_patches/startup/hook")}
    return [
        Start(name, python, _variables() | chosen, _NOTHING, _IS_HOOKED, answer, bar)
        for name, python, chosen, answer, bar in (
            ("no hook", plain, {}, "False False", None),
            ("PYTHONPATH, DS_PATCHES unset", plain, hook, "True False", _UNSET_BAR),
            ("PYTHONPATH, DS_PATCHES=all", plain, hook | _ALL, "True True", _SET_BAR),
            (".pth, DS_PATCHES unset", enabled, {}, "False False", _UNSET_BAR),
            (".pth, DS_PATCHES=all", enabled, _ALL, "False True", _SET_BAR),
        )
    ]


def _imports() -> list[Start]:
    """Of this interpreter and its DeepSpeed; auto-apply finds what patches there are."""
    hooked = _variables() | {"PYTHONPATH": _path(variables.HOOK)}
    python = Path(sys.executable)
    return [
        Start("DS_PATCHES unset", python, hooked, _IMPORT, _IS_LIVE, "False"),
        Start("DS_PATCHES=all", python, hooked | _ALL, _IMPORT, _IS_LIVE, "True"),
        Start("unset, apply_all() in the script", python, hooked, _CALL, _CALL + _IS_LIVE, "True"),
    ]


def _calls(processes: int) -> dict[str, list[Taken]]:
    """What each call took, by process; the first of them has compiled what was not compiled yet."""
    words = [sys.executable, "-c", _TIMED]
    here = _variables() | {"PYTHONPATH": _path()}
    taken: dict[str, list[Taken]] = {name: [] for name in _CALLS}
    for process in range(processes + 1):
        done = subprocess.run(words, env=here, stdout=subprocess.PIPE, text=True, check=True)
        for name, one in zip(_CALLS, json.loads(done.stdout.splitlines()[-1]), strict=True):
            taken[name] += [Taken(**one)] if process else []
    return taken


def _table_of_calls(calls: Mapping[str, Sequence[Taken]]) -> str:
    times = ("CPU ms", "quartiles", "wall ms", "quartiles")
    header = ("import deepspeed, then", *times, "bar", "held")
    body = []
    for name, taken in calls.items():
        row = [name]
        for kind in _KINDS:
            spread = Spread.of([getattr(one, kind) for one in taken])
            row += [f"{spread.median:.1f}", f"{spread.low:.1f} to {spread.high:.1f}"]
        bar, cpu = _CALLS[name], Spread.of([one.cpu for one in taken]).median
        row += ["-", "-"] if bar is None else [f"< {bar:g}", "yes" if cpu < bar else "NO"]
        body.append(row)
    return markdown(header, body)


def _environment(root: Path) -> tuple[Path, Path]:
    """Make a venv with ds_patches alone; returns its interpreter and its site-packages."""
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    shutil.copytree(Path(ds_patches.__file__).parent, site / "ds_patches")
    return root / "bin/python", site


def _variables() -> dict[str, str]:
    """This shell's variables, but for those that change what Python does, or what we do."""
    ours = ("PYTHON", "DS_PATCHES")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _path(*first: Path) -> str:
    """This project, and what this shell has on its path, after these."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [*map(str, first), str(_ROOT), *inherited]))


def _in_turn(starts: Sequence[Start], rounds: int) -> None:
    """Each start once per round, A B C, C B A, A B C ...: drift of the machine meets all alike."""
    for start in starts:
        start.verify()  # which also compiles what is not compiled yet
    turn = list(starts)
    for _ in range(rounds):
        for start in turn:
            start.taken.append(start.once())
        turn.reverse()


def _table(what: str, starts: Sequence[Start]) -> str:
    """What each start took, and what it took beyond the first one's in the same round."""
    header = (what, "CPU ms", "wall ms", "added CPU ms", "quartiles", "added wall ms", "quartiles")
    body = []
    for start in starts:
        row = [start.name]
        row += [f"{Spread.of([getattr(t, k) for t in start.taken]).median:.2f}" for k in _KINDS]
        for kind in _KINDS:
            added = _added(start, starts[0], kind)
            quartiles = f"{added.low:.2f} to {added.high:.2f}"
            row += ["-", "-"] if start is starts[0] else [f"{added.median:.2f}", quartiles]
        body.append(row)
    return markdown(header, body)


def _bars(starts: Sequence[Start]) -> str:
    body = []
    for start in starts:
        if start.bar is not None:
            added = _added(start, starts[0], "cpu").median
            held = "yes" if added < start.bar else "NO"
            body.append((start.name, f"{added:.2f}", f"< {start.bar:g}", held))
    return markdown(("added CPU ms", "measured", "bar", "held"), body) if body else ""


def _added(start: Start, first: Start, kind: str) -> Spread:
    """The differences of the rounds. `kind`: a field of Taken."""
    pairs = zip(start.taken, first.taken, strict=True)
    return Spread.of([getattr(one, kind) - getattr(other, kind) for one, other in pairs])


def _plain(start: Start) -> dict[str, object]:
    return {"name": start.name, "code": start.code, "taken": [asdict(one) for one in start.taken]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=200, help="of bare starts")
    parser.add_argument("--imports", type=positive, default=20, help=f"rounds of `{_IMPORT}`")
    of_any_run(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
