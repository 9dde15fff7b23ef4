"""The shape of a function or class: a digest of its source that ignores what is not behaviour.

`shapes.json` has the hash of each source file that a patch names in any release, and the shape of
each place in it. A file with a recorded hash is not parsed: its places have the shapes of its
release. A shape is read from the source on disk, without importing DeepSpeed, or from the live
object, which also shows whether somebody has replaced it.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import stat
import sys
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from packaging.version import Version

from ds_patches.core import definitions, files, imports, live
from ds_patches.core.patch import Place

#: `make shapes` writes it.
RECORD = Path(__file__).with_name("shapes.json")

#: Shape of a name that does not exist; a known shape only where a patch adds the name.
ABSENT = "absent"
#: Shape of a live object whose source cannot be read.
UNREADABLE = "unreadable"

_DEF = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)")

#: By hash or shape, the releases that have it, as spans: "0.16.0-0.16.4, 0.16.6".
Spans = Mapping[str, str]
#: Path, time and size: what is kept of a file is kept for this state of it.
Stamp = tuple[str, int, int]


class Record(NamedTuple):
    """What was recorded of the releases, oldest first: by module, its source and its places."""

    releases: tuple[Version, ...]
    files: Mapping[str, Spans]
    places: Mapping[str, Mapping[str, Spans]]


class _Found(NamedTuple):
    """A definition in a file. origin: the module that a name is imported from that has none."""

    digest: str = ABSENT
    line: int = 0
    origin: str | None = None


def recorded() -> Record:
    return _read(RECORD)


def known(place: Place) -> Spans:
    """Return the shapes that a place was recorded with."""
    return recorded().places.get(place.module, {}).get(place.qualname, {})


@cache
def has(release: Version, spans: str) -> bool:
    """Whether a release lies in one of the spans; in "" lies none."""
    return any(first <= release <= last for first, last in _parsed(spans))


def of(place: Place, folder: Path) -> str:
    """Return the shape of a place: of the live object if its module is loaded, else of the source.

    folder: the DeepSpeed package's folder.
    """
    return of_live(place) if imports.is_whole(place.module) else of_source(place, folder)


def of_source(place: Place, folder: Path) -> str:
    """Return the shape of a place as the source under `folder` has it."""
    if (file := source(place.module, folder)) is None:
        return ABSENT
    return _of_release(place.module, file_hash(file)).get(place.qualname) or parsed(place, folder)


def parsed(place: Place, folder: Path) -> str:
    """Return the same whatever was recorded."""
    if (file := source(place.module, folder)) is None:
        return ABSENT
    found = _in_file(file, place.module, place.qualname)
    return parsed(Place(found.origin, place.qualname), folder) if found.origin else found.digest


def of_live(place: Place) -> str:
    """Return the shape of a loaded place, of the function or class beneath all wrappers."""
    where = live.site(place)
    value = live.innermost(live.raw(*where)) if where else live.MISSING
    if value is live.MISSING or isinstance(value, live.Absent):
        return ABSENT
    code = getattr(value, "__code__", None)
    if isinstance(value, type):
        path = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    else:
        path = getattr(code, "co_filename", "")
    if (file := _stamp(path)) is None:
        return UNREADABLE
    qualname = getattr(value, "__qualname__", "")
    shape = _of_release(place.module, file_hash(file)).get(qualname)
    if shape and qualname == place.qualname and (code is None or _begins(path, code)):
        return shape
    # Not through inspect.getsource: that dedents, which alters multi-line strings.
    found = _in_file(file, place.module, qualname)
    # Of another line it is of another function, or of a file that has changed since.
    return found.digest if code is None or found.line == code.co_firstlineno else UNREADABLE


def source(module: str, folder: Path) -> Stamp | None:
    """Return the source file of a module, in the state that it is in; None if there is none."""
    inside = os.path.join(folder, *module.split(".")[1:])
    return _stamp(f"{inside}.py") or _stamp(os.path.join(inside, "__init__.py"))


@cache
def file_hash(file: Stamp) -> str:
    """Return 16 hex digits that are those of a file's content."""
    return sha256(Path(file[0]).read_bytes()).hexdigest()[:16]


@cache
def _read(record: Path) -> Record:
    found = json.loads(files.text(record))
    releases = tuple(map(Version, found["releases"].split()))
    return Record(releases, found["files"], found["places"])


@cache
def _parsed(spans: str) -> tuple[tuple[Version, Version], ...]:
    ends = (span.partition("-") for span in filter(None, spans.split(", ")))
    return tuple((Version(first), Version(last or first)) for first, _, last in ends)


@cache
def _of_release(module: str, hash_: str) -> dict[str, str]:
    """Return the shapes of all places of a module whose file was recorded; else nothing."""
    record = recorded()
    if (spans := record.files.get(module, {}).get(hash_)) is None:
        return {}
    release, _ = _parsed(spans)[0]
    return {
        qualname: next((shape for shape, those in shapes.items() if has(release, those)), ABSENT)
        for qualname, shapes in record.places.get(module, {}).items()
    }


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (path, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _begins(path: str, code: CodeType) -> bool:
    """Whether this function's definition begins in the line of the file that the code names."""
    linecache.checkcache(path)
    rest = linecache.getlines(path)[code.co_firstlineno - 1 :]
    head = next((line for line in rest if not line.lstrip().startswith("@")), "")
    return _DEF.findall(head) == [code.co_name]


def _in_file(file: Stamp, module: str, qualname: str) -> _Found:
    """Return a definition, having parsed the file."""
    return _all_in_file(file, frozenset({qualname, *recorded().places.get(module, ())}))[qualname]


@cache
def _all_in_file(file: Stamp, qualnames: frozenset[str]) -> dict[str, _Found]:
    """Return several at once, so that a tree need not be kept."""
    body = definitions.tree(Path(file[0])).body
    nodes = {qualname: definitions.by_name(body, qualname) for qualname in qualnames}
    return {
        qualname: _Found(definitions.digest(node), definitions.first_line(node))
        if node
        else _Found(origin=definitions.imported_from(body, qualname))
        for qualname, node in nodes.items()
    }
