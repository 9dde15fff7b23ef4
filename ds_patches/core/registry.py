"""The patches: every folder of the package that has a `binding.py`, and those of other packages.

There is no list to keep. Another package declares its own in its metadata, each with the name of
the folder that has the `binding.py`:

    [project.entry-points."ds_patches.patches"]
    loud_scale = "our_patches.loud_scale"
"""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from ds_patches import __path__ as our_path
from ds_patches.core.errors import BrokenPatch, UnknownPatch
from ds_patches.core.patch import Patch

GROUP = "ds_patches.patches"


def patches() -> dict[str, Patch]:
    """Return every patch by its name: this package's in alphabetical order, then the others.

    Raises BrokenPatch for a binding that is not there, whose PATCH is not one or is named unlike
    its folder, for a name that is taken, and for a required one that there is not.
    """
    folders = {m.name for m in pkgutil.iter_modules(our_path) if m.ispkg}
    bound = sorted(name for name in folders if find_spec(f"ds_patches.{name}.binding"))
    found = {name: _load(name, f"ds_patches.{name}") for name in bound}
    for name, package in _declared(tuple(sys.path)):
        if name in found:
            raise BrokenPatch(
                f"{package}: there is a patch named {name!r} in {found[name].package}"
            )
        found[name] = _load(name, package)
    for one in found.values():
        if lacking := set(one.requires) - set(found):
            raise BrokenPatch(f"{one.package} requires {', '.join(sorted(lacking))}, no such patch")
    return found


def patch(name: str, where: str = "ds_patches") -> Patch:
    """Return the patch called `name`; raises UnknownPatch, which lists the names."""
    known = patches()
    if name not in known:
        raise UnknownPatch(name, known, where)
    return known[name]


@cache
def _declared(path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return name and package of what the distributions on this path declare."""
    del path  # of which a change asks anew: to read all metadata takes milliseconds
    return sorted((one.name, one.value) for one in entry_points(group=GROUP))


def _load(name: str, package: str) -> Patch:
    try:
        binding = import_module(f"{package}.binding")
    except ModuleNotFoundError as error:
        raise BrokenPatch(f"{package}, of the patch {name!r}: {error}") from error
    found = getattr(binding, "PATCH", None)
    if not isinstance(found, Patch):
        raise BrokenPatch(f"{binding.__name__} has no PATCH")
    if found.name != name:
        raise BrokenPatch(f"{binding.__name__}: PATCH is named {found.name!r}, its folder {name!r}")
    return replace(found, package=package)
