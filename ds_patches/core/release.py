"""Which DeepSpeed is installed, read without importing it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ds_patches.core import once

PACKAGE = "deepspeed"


@dataclass(frozen=True)
class Release:
    """An installed DeepSpeed.

    text: the version as it is told, "0.19.8+abc1234" for a source build; "unknown" if nobody tells.
    version: the same as a number; a local build counts as its base. None if it is no number.
    """

    text: str
    version: Version | None
    folder: Path


@once.per_call
def installed() -> Release | None:
    """Return the DeepSpeed that `import deepspeed` would load, or None.

    Its `__version__` does not exist yet while DeepSpeed's own submodules are being imported.
    """
    try:
        spec = find_spec(PACKAGE)
    except ValueError:  # in sys.modules without a spec: someone's stand-in, not an installation
        return None
    if spec is None or spec.origin is None:  # absent, or a bare folder of that name on the path
        return None
    init = Path(spec.origin)
    text = _told_version(init)
    try:
        return Release(text, Version(Version(text).public), init.parent)
    except InvalidVersion:
        return Release(text, None, init.parent)


def told() -> str:
    """Return the version as the installed DeepSpeed tells it."""
    found = installed()
    return found.text if found else "not installed"


@cache
def covers(specifier: str, version: Version) -> bool:
    """Whether `version` satisfies `specifier`; pre-releases count like any other version."""
    return SpecifierSet(specifier).contains(version, prereleases=True)


def is_newer(specifier: str, version: Version) -> bool:
    """Whether `version` fails `specifier` only by its upper bounds."""
    floor = [str(s) for s in SpecifierSet(specifier) if s.operator in (">=", ">", "!=")]
    return not covers(specifier, version) and covers(",".join(floor), version)


def _told_version(init: Path) -> str:
    """Return what the metadata beside the package says, or a checkout's own file.

    Other metadata is of other copies, or of the day on which a checkout was installed.
    """
    for one in distributions(name=PACKAGE):
        beside = str(one.locate_file(f"{PACKAGE}/__init__.py"))
        if os.path.realpath(beside) == os.path.realpath(init):
            return one.version
    checkout = init.parent.with_name("version.txt")
    return checkout.read_text(encoding="utf-8").strip() if checkout.is_file() else "unknown"
