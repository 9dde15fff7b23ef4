"""The patches: every folder of the package that has a `binding.py`. There is no list to keep."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import ds_patches
from ds_patches.core.errors import BrokenPatch, UnknownPatch
from ds_patches.core.patch import Patch


def patches() -> dict[str, Patch]:
    """Return every patch by its name, in alphabetical order.

    Raises BrokenPatch for a binding whose PATCH is not one or is named unlike its folder.
    """
    folders = {m.name for m in pkgutil.iter_modules(ds_patches.__path__) if m.ispkg}
    bound = sorted(name for name in folders if find_spec(f"ds_patches.{name}.binding"))
    return {name: _load(name) for name in bound}


def patch(name: str, where: str = "ds_patches") -> Patch:
    """Return the patch called `name`; raises UnknownPatch, which lists the names."""
    known = patches()
    if name not in known:
        raise UnknownPatch(name, known, where)
    return known[name]


def _load(name: str) -> Patch:
    binding = import_module(f"ds_patches.{name}.binding")
    found = getattr(binding, "PATCH", None)
    if not isinstance(found, Patch):
        raise BrokenPatch(f"{binding.__name__} has no PATCH")
    if found.name != name:
        raise BrokenPatch(f"{binding.__name__}: PATCH is named {found.name!r}, its folder {name!r}")
    return found
