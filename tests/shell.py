"""The environment of a user's shell."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(**variables: str) -> dict[str, str]:
    """Of a user: none of pytest's flags, and a repository in the place of an installation."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DS_PATCHES")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
