"""The installed DeepSpeed, found without importing it."""

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path

from packaging.version import InvalidVersion, Version

PACKAGE = "deepspeed"

_OPERATORS = {">=": ge, "<=": le, ">": gt, "<": lt, "==": eq, "!=": ne}


@dataclass(frozen=True)
class Release:
    """An installed DeepSpeed.

    text: the version as written, "0.19.8+abc1234" for a source build; "unknown" if it has none.
    version: the same without a local part, for comparisons; None if it is no valid version.
    """

    text: str
    version: Version | None
    folder: Path


def installed() -> Release | None:
    """Return the DeepSpeed that `import deepspeed` would load, or None.

    Reads no `__version__`, which does not exist yet while DeepSpeed imports its submodules.
    """
    try:
        spec = find_spec(PACKAGE)
    except ValueError:  # a module without a spec in sys.modules: a stand-in, not an installation
        return None
    if spec is None or spec.origin is None:  # absent, or a bare folder of that name on the path
        return None
    init = Path(spec.origin)
    text = _version_of(init)
    try:
        return Release(text, Version(Version(text).public), init.parent)
    except InvalidVersion:
        return Release(text, None, init.parent)


def version_text() -> str:
    """Return the installed DeepSpeed's version as written, or "not installed"."""
    release = installed()
    return release.text if release else "not installed"


@cache
def covers(specifier: str, version: Version) -> bool:
    """Return True if a version satisfies ">=0.16.0,<=0.19.8"; pre-releases by their order."""
    bounds = re.findall(r"([<>=!]+)([^,]+)", specifier)
    return all(_OPERATORS[name](version, Version(bound)) for name, bound in bounds)


def _version_of(init: Path) -> str:
    """Return the version in the metadata beside the package, or in a checkout's `version.txt`.

    Metadata elsewhere is that of another copy, or of the day on which a checkout was installed.
    """
    for metadata in distributions(name=PACKAGE):
        beside = str(metadata.locate_file(f"{PACKAGE}/__init__.py"))
        if os.path.realpath(beside) == os.path.realpath(init):
            return metadata.version
    checkout = init.parent.with_name("version.txt")
    return checkout.read_text(encoding="utf-8").strip() if checkout.is_file() else "unknown"
