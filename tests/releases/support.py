"""Prepare support for a new release: the index, ranges, shapes, the matrix and its page.

What is raised here is kept only if the tests pass; what the gate refuses is left to whoever reads
the change. Whatever stops this, the same call goes on there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from packaging.version import Version

from ds_patches.core import registry
from ds_patches.core.patch import Patch
from ds_patches.core.state import State
from ds_patches.symptoms import OLDEST
from tests import releases
from tests.releases import matrix, page, record, say
from tests.releases.install import install

FIRST = Version(OLDEST)
_LINE = "Available versions:"
_RANGE = re.compile(r'(\bsupported="[^"]*<=)[^",]+(")')

_REST = """
Left to you, for {version}:
- read the changes upstream, and what {version} gets wrong: ds_patches/symptoms.py, with TESTED
- the release of the test environment: deepspeed== in pyproject.toml
- texts that name the release before: git grep {before}
- a line in CHANGELOG.md
"""


def support(version: str) -> int:
    """Do all of it for one release; 1 if a patch was refused or a test failed."""
    look()
    known = record.load().releases
    if version not in known:
        raise ValueError(f"the package index has no release {version}")
    if install(known):
        return 1
    refused = [n for n, answer in matrix.ask(version).items() if not _takes(n, version, answer)]
    failed = python("-m", "tests.releases", "record", version)
    # A range that has moved is a claim about every release.
    failed = failed or python("-m", "tests.releases", "record")
    say(_REST.format(version=version, before=known[known.index(version) - 1]))
    if refused:
        say(f"refused, because its code there is not what was tested: {', '.join(refused)}")
    return int(bool(failed or refused))


def _takes(name: str, version: str, answer: matrix.Answer) -> bool:
    """Raise a patch's range to a release whose every shape it knows, and record the shapes."""
    if answer.state not in (State.UNKNOWN_VERSION, State.READY):
        return answer.state is State.FIXED_UPSTREAM
    file = binding_of(registry.patch(name))
    before = file.read_text(encoding="utf-8")
    file.write_text(raised(before, version), encoding="utf-8")
    folder = str(releases.folder())
    if python("-m", "ds_patches", "record-shapes", name, "--releases", folder):
        file.write_text(before, encoding="utf-8")
        return False
    say(f"{name}: supported up to {version}")
    return True


def raised(text: str, version: str) -> str:
    """A binding's text with this release as the last that it supports."""
    found = _RANGE.search(text)
    if not found:
        raise ValueError('the binding has no supported="...<=RELEASE"')
    return _RANGE.sub(rf"\g<1>{Version(version)}\g<2>", text, count=1)


def binding_of(patch: Patch) -> Path:
    return Path(str(import_module(f"{patch.package}.binding").__file__))


def python(*arguments: str) -> int:
    """A process of its own: this one has read the bindings as they were."""
    return subprocess.run([sys.executable, *arguments], cwd=releases.ROOT).returncode


def look(into: Path = record.FILE) -> int:
    """Record which releases there are; 1 when one has an unknown cell."""
    found = on_index()
    records = record.load(into).knowing(found, date.today().isoformat())
    record.save(records, into)
    page.rewrite(records, into.with_suffix(".md"))
    print(f"{len(found)} releases on the index, {found[-1]} to {found[0]}")
    if untested := records.untested():
        print(f"not tested: {', '.join(untested)}. To look closer:\n\n    {closer(untested)}")
    return int(bool(untested))


def on_index() -> list[str]:
    """The releases from `FIRST` on, newest first, no pre-releases; raises ValueError."""
    command = [sys.executable, "-m", "pip", "index", "versions", "deepspeed"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_LINE)]
    if done.returncode or not lines:
        raise ValueError(done.stderr.strip() or f"pip stopped with code {done.returncode}")
    versions = map(Version, lines[0].removeprefix(_LINE).split(","))
    return [str(v) for v in versions if v >= FIRST and not v.is_prerelease]


def closer(versions: Sequence[str]) -> str:
    """The command that tests these releases."""
    return f".venv/bin/python -m tests.releases record {' '.join(versions)}"
