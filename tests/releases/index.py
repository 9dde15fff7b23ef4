"""Which DeepSpeed releases the package index has, and which of them nobody tested."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from packaging.version import Version

from tests.releases import page, record

FIRST = Version("0.16.0")
_LINE = "Available versions:"


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
