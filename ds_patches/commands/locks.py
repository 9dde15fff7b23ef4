"""Locks of torch's extension builder that a killed build left behind.

Before torch builds an extension it makes a file `lock` beside it, and removes it afterwards. If it
is killed in between, the file stays, and every later run that needs the extension waits silently,
for ever. On a CPU, DeepSpeed builds an extension in every run that finds none.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

#: Seconds. Few builds take as long.
OLD = 600.0


def folder(environment: Mapping[str, str]) -> Path:
    """Return where torch builds extensions, on Linux."""
    if chosen := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(environment.get("XDG_CACHE_HOME") or f"{home}/.cache", "torch_extensions")


def lines(environment: Mapping[str, str], older_than: float = OLD) -> list[str]:
    """Say of each lock that is older than this many seconds how old it is, how to remove it."""
    root, now, said = folder(environment), time.time(), []
    # In torch's own folder there is one more level: the Python and the device.
    for lock in sorted((*root.glob("*/lock"), *root.glob("*/*/lock"))):
        try:
            age = now - lock.stat().st_mtime
        except OSError:  # removed meanwhile: somebody built there
            continue
        if age > older_than:
            said.append(
                f"{lock} is {_said(age)} old: every run that needs the extension "
                f"{lock.parent.name} waits silently until it is removed. "
                "If nothing is building it: "
                f"rm {shlex.quote(str(lock))}"
            )
    return said


def _said(age: float) -> str:
    for name, seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age >= 2 * seconds:
            return f"{age // seconds:.0f} {name}s"
    return f"{age:.0f} seconds"
