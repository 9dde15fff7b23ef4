"""Shapes of the code that patches touch, in each release: ds_patches/core/shapes.json.

`make shapes` writes the file; `git diff` says what has changed. Nothing of a release is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from ds_patches.core import columns, gate, registry, release, shape
from ds_patches.core.patch import Dependency, Target
from tools import releases
from tools.releases import install, say

#: By hash or shape, the releases that have it.
Found = dict[str, list[Version]]


def installed() -> dict[Version, Path]:
    """The package's folder of every release; what is missing is installed."""
    if install(releases.RELEASES):
        raise SystemExit(1)
    return {Version(v): releases.place(v) / release.PACKAGE for v in releases.RELEASES}


def record(sources: Mapping[Version, Path]) -> int:
    """Record every patch from these releases, oldest first; 1, nothing written, for a fault."""
    faults = []
    files: dict[str, Found] = {}
    places: dict[str, dict[str, Found]] = {}
    every = {place.key: place for version in sources for place in _places(version)}
    for version, folder in sources.items():
        for module in {place.module for place in every.values()}:
            if file := shape.source(module, folder):
                hashes = files.setdefault(module, {})
                hashes.setdefault(shape.file_hash(file), []).append(version)
        touched = {place.key: place for place in _places(version)}
        for key, place in every.items():
            digest = shape.parsed(place, folder)
            if digest == shape.ABSENT:
                faults += [f"{key} does not exist in {version}"] * (key in touched)
                continue
            shapes = places.setdefault(place.module, {}).setdefault(place.qualname, {})
            shapes.setdefault(digest, []).append(version)
    if faults:
        say("\n".join(faults))
        return 1
    new = {
        "releases": " ".join(map(str, sources)),
        "files": _spans(files, [*sources]),
        "places": {module: _spans(places[module], [*sources]) for module in sorted(places)},
    }
    shape.RECORD.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return 0


def _places(version: Version) -> set[Target | Dependency]:
    """Return the places that patches touch in a release, each once."""
    patches = (p for p in registry.patches().values() if release.covers(p.supported, version))
    by_key = {place.key: place for patch in patches for place in gate.places(patch, version)}
    return {*by_key.values()}


def _spans(shapes: Mapping[str, Found], every: list[Version]) -> dict[str, dict[str, str]]:
    return {
        name: {what: columns.spans(some, every) for what, some in shapes[name].items()}
        for name in sorted(shapes)
    }
