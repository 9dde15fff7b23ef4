"""`record-shapes`: what the code that a patch touches looks like in each release."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from ds_patches.core import columns, gate, release, shape
from ds_patches.core.errors import FlagError
from ds_patches.core.patch import Patch, Target

#: By place and shape, the releases that have it.
Found = dict[str, dict[str, list[Version]]]


def record(patch: Patch, folder: Path) -> bool:
    """Write a patch's `shapes.json` from the sources of releases; print what has changed in it.

    folder: holds a folder for each release, as `pip install --target` fills it. Nothing in there is
        imported; what `supported` leaves out is left out.
    Returns False, having written nothing, where a release lacks a place. Raises FlagError where
    there is no release, or one folder is of two.
    """
    sources = _sources(folder, patch.supported)
    found, missing = _found(patch, sources)
    if missing:
        print(*missing, sep="\n", file=sys.stderr)
        return False
    new = {
        key: {digest: columns.spans(some, [*sources]) for digest, some in found[key].items()}
        for key in sorted(found)
    }
    path = shape.recorded_at(patch)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    print(*list(_changes(_lines(old), _lines(new))) or ["no drift"], sep="\n")
    path.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    for beyond in _beyond(patch.supported, [*sources]):
        print(f"warning: {folder} has no DeepSpeed in {beyond}", file=sys.stderr)
    return True


def _sources(folder: Path, supported: str) -> dict[Version, Path]:
    """Return where each release's package lies, oldest first; other packages may lie there too."""
    found = distributions(name=release.PACKAGE, path=[str(one) for one in folder.glob("*")])
    places = {Version(one.version): Path(str(one.locate_file(release.PACKAGE))) for one in found}
    if len({*places.values()}) < len(places):
        raise FlagError(f"{folder} has a folder with the metadata of two releases")
    covered = {one: places[one] for one in sorted(places) if release.covers(supported, one)}
    if not covered:
        raise FlagError(f"{folder} has no folder of a DeepSpeed in {supported}")
    return covered


def _found(patch: Patch, sources: Mapping[Version, Path]) -> tuple[Found, list[str]]:
    """Return the shapes of every place, and which place is missing where it is claimed."""
    found: Found = {}
    missing = []
    for version, package in sources.items():
        for place in gate.places(patch, version):
            digest = shape.of_source(place, package)
            if digest == shape.ABSENT and not (isinstance(place, Target) and place.adds):
                missing.append(f"{place.key} does not exist in {version}")
            found.setdefault(place.key, {}).setdefault(digest, []).append(version)
    return found, missing


def _lines(shapes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {f"{key} {digest}": spans for key, of in shapes.items() for digest, spans in of.items()}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for one in sorted({*before, *after}):
        if one not in after:
            yield f"- {one} ({before[one]})"
        elif one not in before:
            yield f"+ {one} ({after[one]})"
        elif before[one] != after[one]:
            yield f"~ {one} ({before[one]} -> {after[one]})"


def _beyond(supported: str, recorded: list[Version]) -> Iterator[str]:
    """Name what `supported` covers before the oldest and after the newest that was recorded.

    There the gate would judge by shapes that nobody has looked for.
    """
    oldest, newest = recorded[0], recorded[-1]
    if release.covers(supported, Version(f"{oldest.base_version}.dev0")):
        yield f"{supported} before {oldest}"
    if release.covers(supported, Version(f"{newest.base_version}.1")):
        yield f"{supported} after {newest}"
