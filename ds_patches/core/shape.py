"""The shape of a function or class: a digest of its source without comments and docstrings.

`shapes.json` has, for every release, the hash of each source file that a patch names, and the shape
of each place in it. A file with a recorded hash is not parsed: its places have the recorded shapes.
Once a module is imported, its live objects are compared, which another library may have replaced.
"""

import json
import linecache
import os
import re
import stat
import sys
from bisect import bisect
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from packaging.version import Version

from ds_patches.core import definitions, files, live
from ds_patches.core.patch import Place

#: Written by `make shapes`.
RECORD = Path(__file__).with_name("shapes.json")

#: Shape of a name that does not exist.
ABSENT = "absent"
#: Shape of a live object whose source cannot be read.
UNREADABLE = "unreadable"

_DEF = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)")

#: By hash or shape, the releases that have it, as spans: "0.16.0-0.16.4, 0.16.6".
Spans = Mapping[str, str]
#: A file's path, time and size: the caches below are for this state of the file.
Stamp = tuple[str, int, int]


class Record(NamedTuple):
    """The content of `shapes.json`: the releases, oldest first; by module, its files and places."""

    releases: tuple[Version, ...]
    files: Mapping[str, Spans]
    places: Mapping[str, Mapping[str, Spans]]


class _Definition(NamedTuple):
    """A definition in a file, or `origin`: the module that the name is imported from."""

    digest: str = ABSENT
    line: int = 0
    origin: str | None = None


def recorded() -> Record:
    return _read(RECORD)


def known(place: Place) -> Spans:
    """Return the shapes that a place was recorded with."""
    return recorded().places.get(place.module, {}).get(place.qualname, {})


def of_release(place: Place, release: Version) -> str:
    """Return the shape that a place was recorded with in a release."""
    return _of_release(place.module, release).get(place.qualname, ABSENT)


def nearest_release(version: Version) -> Version | None:
    """Return the recorded release of this version, or else the last one before it."""
    releases = recorded().releases
    return releases[index - 1] if (index := bisect(releases, version)) else None


@cache
def lies_in(release: Version, spans: str) -> bool:
    """Return True if a release lies in one of the spans."""
    return any(first <= release <= last for first, last in _bounds(spans))


def is_loaded(module: str) -> bool:
    """Return True if a module has finished importing."""
    spec = getattr(sys.modules.get(module), "__spec__", None)  # some entries are no modules
    return module in sys.modules and not getattr(spec, "_initializing", False)


def of(place: Place, folder: Path) -> str:
    """Return the shape of a place, of the live object if its module is loaded, else the source.

    folder: the DeepSpeed package's folder.
    """
    return of_live(place) if is_loaded(place.module) else of_source(place, folder)


def of_source(place: Place, folder: Path) -> str:
    """Return the shape of a place in the source on disk."""
    if (file := source(place.module, folder)) is None:
        return ABSENT
    return _of_file(place.module, file_hash(file)).get(place.qualname) or parsed(place, folder)


def parsed(place: Place, folder: Path) -> str:
    """Return the shape of a place in the source on disk, without using recorded shapes."""
    if (file := source(place.module, folder)) is None:
        return ABSENT
    digest, _, origin = _in_file(file, place.module, place.qualname)
    return parsed(Place(origin, place.qualname), folder) if origin else digest


def of_live(place: Place) -> str:
    """Return the shape of a place in an imported module, beneath all wrappers."""
    site = live.site(place)
    value = live.innermost(live.raw(*site)) if site else live.MISSING
    if value is live.MISSING:
        return ABSENT
    code = getattr(value, "__code__", None)
    if isinstance(value, type):
        path = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    else:
        path = getattr(code, "co_filename", "")
    if (file := _stamp(path)) is None:
        return UNREADABLE
    qualname, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    shape = _of_file(module, file_hash(file)).get(qualname)
    if shape and qualname == place.qualname and (code is None or _begins(path, code)):
        return shape
    # Not by inspect.getsource: that dedents, which alters multi-line strings.
    digest, line, _ = _in_file(file, place.module, qualname)
    # On another line it is another function, or the file has changed since the import.
    return digest if code is None or line == code.co_firstlineno else UNREADABLE


def source(module: str, folder: Path) -> Stamp | None:
    """Return the source file of a module; None if there is none."""
    inside = os.path.join(folder, *module.split(".")[1:])
    return _stamp(f"{inside}.py") or _stamp(os.path.join(inside, "__init__.py"))


@cache
def file_hash(file: Stamp) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file."""
    return sha256(Path(file[0]).read_bytes()).hexdigest()[:16]


@cache
def _read(record: Path) -> Record:
    content = json.loads(files.text(record))
    releases = tuple(map(Version, content["releases"].split()))
    return Record(releases, content["files"], content["places"])


@cache
def _bounds(spans: str) -> tuple[tuple[Version, Version], ...]:
    ends = (span.partition("-") for span in filter(None, spans.split(", ")))
    return tuple((Version(first), Version(last or first)) for first, _, last in ends)


@cache
def _of_release(module: str, release: Version) -> dict[str, str]:
    return {
        qualname: next((s for s, spans in shapes.items() if lies_in(release, spans)), ABSENT)
        for qualname, shapes in recorded().places.get(module, {}).items()
    }


def _of_file(module: str, hash_: str) -> dict[str, str]:
    """Return the recorded shapes of a module's places; empty if no release has such a file."""
    spans = recorded().files.get(module, {}).get(hash_)
    return _of_release(module, _bounds(spans)[0][0]) if spans else {}


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (path, status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _begins(path: str, code: CodeType) -> bool:
    """Return True if the file still has this function's `def` on the line that the code names."""
    linecache.checkcache(path)
    lines = linecache.getlines(path)[code.co_firstlineno - 1 :]
    head = next((line for line in lines if not line.lstrip().startswith("@")), "")
    return _DEF.findall(head) == [code.co_name]


def _in_file(file: Stamp, module: str, qualname: str) -> _Definition:
    """Parse a file, and return a definition in it."""
    return _all_in_file(file, frozenset({qualname, *recorded().places.get(module, ())}))[qualname]


@cache
def _all_in_file(file: Stamp, qualnames: frozenset[str]) -> dict[str, _Definition]:
    """Parse a file once for several definitions; the tree is not kept."""
    body, by_name = definitions.tree(Path(file[0])).body, {}
    for qualname in qualnames:
        if node := definitions.by_name(body, qualname):
            # That of the first decorator, as in `co_firstlineno`.
            line = min(part.lineno for part in (node, *node.decorator_list))
            by_name[qualname] = _Definition(definitions.digest(node), line)
        else:
            by_name[qualname] = _Definition(origin=definitions.imported_from(body, qualname))
    return by_name
