"""DeepSpeed releases with the torch that people have beside them.

pairs.json says which. Each is recorded in an environment of its
own, .releases/torch-<version>, which is removed afterwards: it takes some 5 GB. The release comes
from .releases, as everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from tests import releases
from tests.releases import page, record, say
from tests.releases.install import install_one

#: What the suite, its command line and DeepSpeed's compiled ops need besides.
_TOOLS = ("numpy", "packaging>=22", "pytest>=8", "setuptools", "wheel", "wrapt>=2.4,<3")

#: What an environment takes while it is made, with what pip unpacks: twice its size.
_GIGABYTES = 12


class Pair(NamedTuple):
    """A release and a torch."""

    release: str
    torch: str

    def __str__(self) -> str:
        return f"{self.release}+{self.torch}"


def known() -> tuple[Pair, ...]:
    """Those of pairs.json."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return tuple(Pair(**one) for one in json.loads(text))


def parse(text: str) -> Pair:
    """The pair that 0.16.9+2.6.0 names."""
    release, plus, torch = text.partition("+")
    if not (release and plus and torch):
        raise ValueError(f"{text!r} is no pair; one is written as {known()[0]}")
    return Pair(release, torch)


def run(wanted: Sequence[Pair], again: bool = False) -> int:
    """Record these pairs, or all that are outstanding, one after the other; 1 when one is left."""
    outstanding = [pair for pair in wanted or known() if again or record.load().outstanding(*pair)]
    for pair in outstanding:
        say(f"== DeepSpeed {pair.release} with torch {pair.torch}")
        if trouble := in_its_environment(pair, partial(_record, pair, again)):
            say(trouble)
    page.rewrite(record.load())
    left = [str(pair) for pair in outstanding if record.load().outstanding(*pair)]
    say(f"left to look into: {' '.join(left)}" if left else "all of them are recorded")
    return int(bool(left))


def in_its_environment(pair: Pair, work: Callable[[Path], str]) -> str:
    """Make the environment, let `work` use its Python, remove it; what went wrong, if anything."""
    if install_one(pair.release):
        return f"DeepSpeed {pair.release} could not be installed"
    folder = releases.folder() / f"torch-{pair.torch}"
    shutil.rmtree(folder, ignore_errors=True)
    if (free := shutil.disk_usage(releases.folder()).free / 1e9) < _GIGABYTES:
        return f"{free:.0f} GB are free; an environment may take {_GIGABYTES}"
    try:
        return _make(folder, pair) or work(folder / "bin" / "python")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _record(pair: Pair, again: bool, python: Path) -> str:
    """Record the release with that Python: it is the torch there that the records name."""
    command = [str(python), "-m", "tests.releases", "record", pair.release]
    code = subprocess.run([*command, *["--again"][: int(again)]], cwd=releases.ROOT).returncode
    return f"stopped with code {code}" if code else ""


def requirements(pair: Pair) -> list[str]:
    """What the environment holds: that torch, and what the release and the suite import."""
    found = next(iter(distributions(name="deepspeed", path=[str(releases.place(pair.release))])))
    needed = map(Requirement, found.requires or ())
    present = [str(one) for one in needed if one.name != "torch" and not one.marker]
    return [f"torch=={pair.torch}", *present, *_TOOLS]


def _make(folder: Path, pair: Pair) -> str:
    """An environment for the pair; what pip or venv said if it failed, else nothing."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--prefer-binary"]
    # The caller's path may hold another torch.
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in [sys.executable, "-m", "venv", str(folder)], [*pip, *requirements(pair)]:
        done = subprocess.run(
            command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            return done.stdout
    return ""
