"""The patches: there is no list to keep.

A folder of the package that has a `binding` is one, and so is a module beside the folders that
defines `PATCH`: a small cure. They are found without importing another module, and whatever the
package lies in: a folder, with its sources or without, or a zip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

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
    """Yield the names of patches, and of the modules that define them."""
    for _, name, is_folder in iter_modules(path):
        home = f"ds_patches.{name}"
        spec: Any = find_spec(home)
        if is_folder:
            if any(one.name == "binding" for one in iter_modules(spec.submodule_search_locations)):
                yield name, f"{home}.binding"
        elif "PATCH" in spec.loader.get_code(home).co_names:  # as compiled, not run
            yield name, home
