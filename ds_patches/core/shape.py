"""The shape of a function or class: a digest of its source that ignores what is not behaviour.

Two ways lead to the same digest: from the source on disk, without importing DeepSpeed, and from
the live object, which also shows whether somebody has replaced it.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from packaging.version import Version

from ds_patches.core import definitions, imports, live
from ds_patches.core.patch import Patch, Place

#: Spans of releases, each by its first and its last.
Spans = tuple[tuple[Version, Version], ...]

#: Shape of a name that does not exist; a known shape only where a patch adds the name.
ABSENT = "absent"
#: Shape of a live object whose source cannot be read.
UNREADABLE = "unreadable"


def known(patch: Patch) -> dict[str, dict[str, str]]:
    """Return the recorded shapes of a patch: place -> digest -> spans of releases."""
    return json.loads(recorded_at(patch).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def spans(patch: Patch) -> dict[str, dict[str, Spans]]:
    """Return the same with the spans as pairs of releases, first and last."""
    return {
        key: {found: _parsed(text) for found, text in shapes.items()}
        for key, shapes in known(patch).items()
    }


def is_within(version: Version, spans: Spans) -> bool:
    """Whether a release lies in one of the spans."""
    return any(first <= version <= last for first, last in spans)


def recorded_at(patch: Patch) -> Path:
    """Return the file that holds the recorded shapes of a patch, beside its binding."""
    binding = import_module(f"{patch.package}.binding")  # the folder may have no __init__.py
    return Path(str(binding.__file__)).with_name("shapes.json")


def of(place: Place, folder: Path) -> str:
    """Return the shape of a place: of the live object if its module is loaded, else of the source.

    folder: the DeepSpeed package's folder.
    """
    return of_live(place) if imports.is_whole(place.module) else of_source(place, folder)


def of_source(place: Place, folder: Path) -> str:
    """Return the shape of a place as the source under `folder` has it."""
    inside = folder.joinpath(*place.module.split(".")[1:])
    candidates = (inside.with_suffix(".py"), inside / "__init__.py")
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        return ABSENT
    file = definitions.stamp(path)
    digest, _ = _found(file, place.qualname)
    if digest == ABSENT and (origin := definitions.imported_from(file, place.qualname)):
        return of_source(Place(origin, place.qualname), folder)
    return digest


def of_live(place: Place) -> str:
    """Return the shape of a loaded place, of the function or class beneath all wrappers."""
    where = live.site(place)
    value = live.innermost(live.raw(*where)) if where else live.MISSING
    if value is live.MISSING or isinstance(value, live.Absent):
        return ABSENT
    code = getattr(value, "__code__", None)
    if isinstance(value, type):
        path = Path(getattr(sys.modules.get(value.__module__), "__file__", None) or "")
    else:
        path = Path(getattr(code, "co_filename", ""))
    if not path.is_file():
        return UNREADABLE
    # Not through inspect.getsource: that dedents, which alters multi-line strings.
    digest, line = _found(definitions.stamp(path), getattr(value, "__qualname__", ""))
    # Of another line it is of another function, or of a file that has changed since.
    return digest if code is None or line == code.co_firstlineno else UNREADABLE


@cache
def _parsed(text: str) -> Spans:
    """Read "0.16.0-0.16.4, 0.16.6"."""
    ends = (span.strip().partition("-") for span in text.split(","))
    return tuple((Version(first), Version(last or first)) for first, _, last in ends)


@cache
def _found(file: definitions.Stamp, qualname: str) -> tuple[str, int]:
    """Return the digest of a definition, and the line that it begins in."""
    found = definitions.by_name(file, qualname)
    if found is None:
        return ABSENT, 0
    return definitions.digest(found), definitions.first_line(found)
