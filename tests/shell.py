"""The environment of a user's shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(**variables: str) -> dict[str, str]:
    """Return a user's variables: none of pytest's flags, the repository as the installation."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DS_PATCHES")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables


def python(*words: str, variables: dict[str, str] | None = None, **more: Any) -> Any:
    """Run Python with these words in the repository, in a user's environment; what became of it."""
    own = environment(**(variables or {}))
    how = {"capture_output": True, "text": True, "timeout": 1200}
    return subprocess.run([sys.executable, *words], cwd=REPOSITORY, env=own, **how | more)


def is_made_odd(path: Path, kind: str) -> bool:
    """Make a "folder" or "device" there, where a file is expected; else do nothing."""
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    return kind in ("folder", "device")
