"""All patches: each folder of the package that has a `binding`, and each module of `cures`.

Finds them in a folder or a zip, with sources or compiled files alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ds_patches import __path__ as our_path
from ds_patches.core.errors import DsPatchesError, UnknownPatch
from ds_patches.core.patch import Patch


def patches() -> Mapping[str, Patch]:
    """Return every patch by its name, in alphabetical order.

    Raises DsPatchesError if there is none, as in an incomplete installation.
    """
    return _patches_in(tuple(our_path))


def patch(name: str, source: str = "ds_patches") -> Patch:
    """Return a patch by its name; raises UnknownPatch, which lists the names."""
    known = patches()
    if name not in known:
        raise UnknownPatch(name, known, source)
    return known[name]


@cache
def _patches_in(path: tuple[str, ...]) -> Mapping[str, Patch]:
    patches = {name: import_module(module).PATCH for name, module in sorted(_modules(path))}
    if not patches:
        raise DsPatchesError(
            f"no patch in {', '.join(path)}: reinstall ds_patches, which is incomplete"
        )
    return patches


def _modules(path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name of each patch, and the module that defines it."""
    for folder in _names(path):
        names = [*_names(f"{parent}/{folder}" for parent in path)]
        if folder == "cures":
            yield from ((name, f"ds_patches.cures.{name}") for name in names)
        elif "binding" in names:
            yield folder, f"ds_patches.{folder}.binding"


def _names(path: Iterable[str]) -> Iterator[str]:
    return (name for _, name, _ in iter_modules([*path]))
