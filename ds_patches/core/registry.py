"""The patches: there is no list to keep.

A folder of the package that has a `binding.py` is one, and so is a file beside the folders that
has a line which begins with `PATCH = Patch(`: a small cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from ds_patches import __path__ as our_path
from ds_patches.core.errors import UnknownPatch
from ds_patches.core.patch import Patch

_CURE = "\nPATCH = Patch("


def patches() -> Mapping[str, Patch]:
    """Return every patch by its name, in alphabetical order."""
    return _found(tuple(our_path))


def patch(name: str, where: str = "ds_patches") -> Patch:
    """Return the patch called `name`; raises UnknownPatch, which lists the names."""
    known = patches()
    if name not in known:
        raise UnknownPatch(name, known, where)
    return known[name]


@cache
def _found(path: tuple[str, ...]) -> Mapping[str, Patch]:
    modules: dict[str, str] = {}
    for folder in map(Path, path):
        modules |= {file.parent.name: ".binding" for file in folder.glob("*/binding.py")}
        texts = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
        modules |= {name: "" for name, text in texts.items() if _CURE in text}
    return {
        name: import_module(f"ds_patches.{name}{binding}").PATCH
        for name, binding in sorted(modules.items())
    }
