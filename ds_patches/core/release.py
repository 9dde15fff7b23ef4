"""Which DeepSpeed is installed, read without importing it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PACKAGE = "deepspeed"


@dataclass(frozen=True)
class Release:
    """An installed DeepSpeed.

    text: the version as the metadata spells it, "0.19.8+abc1234" for a source build.
    version: the version that gates; a local build counts as its base. None without metadata.
    folder: the package's folder, where its sources lie.
    """

    text: str
    version: Version | None
    folder: Path


def installed() -> Release | None:
    """Return the DeepSpeed that `import deepspeed` would load, or None.

    `deepspeed.__version__` is of no use here: it would need the import, and it does not exist yet
    while DeepSpeed's own submodules are being imported.
    """
    spec = _spec()
    if spec is None or spec.origin is None:  # absent, or a bare folder of that name on the path
        return None
    init = Path(spec.origin)
    found = _distribution_of(init)
    if found is None:
        return Release("unknown", None, init.parent)
    text = found.version  # asked once: each time, all the metadata is parsed
    return Release(text, Version(Version(text).public), init.parent)


def covers(specifier: str, version: Version) -> bool:
    """Whether `version` satisfies `specifier`; pre-releases count like any other version.

    packaging's default for pre-releases differs between its versions, hence the explicit flag.
    """
    return SpecifierSet(specifier).contains(version, prereleases=True)


def is_newer(specifier: str, version: Version) -> bool:
    """Whether `version` fails `specifier` only by its upper bounds."""
    floor = [str(s) for s in SpecifierSet(specifier) if s.operator in (">=", ">", "!=")]
    return not covers(specifier, version) and covers(",".join(floor), version)


def _spec() -> ModuleSpec | None:
    try:
        return find_spec(PACKAGE)
    except ValueError:  # in sys.modules without a spec: someone's stand-in, not an installation
        return None


def _distribution_of(init: Path) -> Distribution | None:
    """Return the metadata that lies beside the package, or that of an editable install.

    Other metadata on the path belongs to another copy of DeepSpeed.
    """
    for one in distributions(name=PACKAGE):
        beside = str(one.locate_file(f"{PACKAGE}/__init__.py"))
        if os.path.realpath(beside) == os.path.realpath(init) or _is_editable(one):
            return one
    return None


def _is_editable(distribution: Distribution) -> bool:
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))
