"""The patches: each folder of the package that has a `binding`, and each module of `cures`.

They are found whatever the package lies in: a folder, with its sources or without, or a zip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ds_patches import __path__ as our_path
from ds_patches.core.errors import DsPatchesError, UnknownPatch
from ds_patches.core.patch import Patch


def patches() -> Mapping[str, Patch]:
    """Return every patch by its name, in alphabetical order.

    Raises DsPatchesError where there is none: the package is not whole.
    """
    return _found(tuple(our_path))


def patch(name: str, where: str = "ds_patches") -> Patch:
    """Return the patch called `name`; raises UnknownPatch, which lists the names."""
    known = patches()
    if name not in known:
        raise UnknownPatch(name, known, where)
    return known[name]


@cache
def _found(path: tuple[str, ...]) -> Mapping[str, Patch]:
    found = {name: import_module(home).PATCH for name, home in sorted(_homes(path))}
    if not found:
        raise DsPatchesError(f"no patch is found in {', '.join(path)}: not installed whole")
    return found


def _homes(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for folder in _names(path):
        within = [*_names(f"{one}/{folder}" for one in path)]
        if folder == "cures":
            yield from ((name, f"ds_patches.cures.{name}") for name in within)
        elif "binding" in within:
            yield folder, f"ds_patches.{folder}.binding"


def _names(path: Iterable[str]) -> Iterator[str]:
    return (name for _, name, _ in iter_modules([*path]))
