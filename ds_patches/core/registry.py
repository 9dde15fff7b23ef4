"""The patches: every folder of the package that has a `binding.py`, and those of other packages.

There is no list to keep. Another package declares its own as entry points, each of which names the
folder that has the `binding.py`.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from ds_patches import __path__ as our_path
from ds_patches.core import values
from ds_patches.core.errors import UnknownPatch
from ds_patches.core.patch import Link, Option, Patch, Place

log = logging.getLogger("ds_patches")

GROUP = "ds_patches.patches"


def patches() -> dict[str, Patch]:
    """Return every patch by its name: this package's in alphabetical order, then the others.

    One that cannot be used is there too, and its `broken` says why: others are not the worse for
    it. Where its name is taken, it goes by that of its package.
    """
    folders = (file.parent for at in our_path for file in Path(at).glob("*/binding.py"))
    bound = [(name, f"ds_patches.{name}") for name in sorted({folder.name for folder in folders})]
    found: dict[str, Patch] = {}
    for name, package in (*bound, *_declared(tuple(sys.path))):
        if name in found:
            why = f"{package}: there is a patch named {name!r} in {found[name].package}"
            found[package] = _broken(package, package, why)
        else:
            found[name] = _load(name, package)
    for name, one in found.items():
        if unfit := [r for r in one.requires if r not in found or found[r].requires]:
            why = f"{one.package} requires {', '.join(unfit)}: no patch, or it requires another"
            found[name] = replace(one, requires=(), broken=why)
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
    try:
        return sorted({(one.name, one.value) for one in entry_points(group=GROUP)})
    except Exception as error:  # some package's entry_points.txt, of whatever group
        log.warning("patches of other packages are not looked for: %s", error)
        return []


@cache  # also of what raised: half of it may be imported now, and a second try would find that
def _load(name: str, package: str) -> Patch:
    binding = f"{package}.binding"
    try:
        found = getattr(import_module(binding), "PATCH", None)
        if not isinstance(found, Patch):
            return _broken(name, package, f"{binding} has no PATCH")
        _must_be_typed(found)
    except (Exception, SystemExit) as error:
        return _broken(name, package, f"{binding} cannot be read: {type(error).__name__}: {error}")
    if found.name != name:
        why = f"{binding}: PATCH is named {found.name!r}, its folder {name!r}"
        return _broken(name, package, why)
    return replace(found, package=package)


def _must_be_typed(found: Patch) -> None:
    """Raise for what would raise at whoever reads it later: a comma is forgotten easily."""
    places = (*found.targets, *found.dependencies)
    held = {Place: places, Link: found.upstream, Option: found.options, str: found.requires}
    for kind, ones in held.items():
        if wrong := [one for one in ones if not isinstance(one, kind)]:
            raise TypeError(f"{wrong[0]!r} is no {kind.__name__}")
    for option in found.options:
        if values.choice(option, option.default) is None:
            raise values.no_choice(option.name, option.default, option.words)


def _broken(name: str, package: str, why: str) -> Patch:
    return Patch(name, "(broken)", supported="", targets=(), package=package, broken=why)
