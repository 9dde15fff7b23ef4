"""Record the shapes of a patch's targets and dependencies from the sources of many releases.

    python tools/record_shapes.py zero3_retain --releases DIR

DIR holds one folder for each version, filled by `pip install --no-deps --target DIR/<version>
deepspeed==<version>`. Sources are parsed, nothing is imported. Writes `shapes.json` into the
patch's folder and prints what changed against the old one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from packaging.version import Version

from ds_patches.core import gate, registry, release, shape
from ds_patches.core.patch import Patch, Place, Target

Shapes = dict[str, dict[str, str]]


def record(patch: Patch, folder: Path) -> tuple[Shapes, list[str]]:
    """Return the shapes of every place over the supported releases in `folder`, and complaints."""
    versions = sorted(Version(one.name) for one in _releases_in(folder))
    shapes: dict[str, dict[str, list[Version]]] = {}
    complaints = []
    for version in versions:
        if not release.covers(patch.supported, version):
            continue
        for place in (*gate.targets(patch, version), *gate.dependencies(patch, version)):
            digest = shape.of_source(place, folder / str(version) / release.PACKAGE)
            if digest == shape.ABSENT and not _may_be_absent(place):
                complaints.append(f"{place.key} does not exist in {version}")
            else:
                shapes.setdefault(place.key, {}).setdefault(digest, []).append(version)
    spans = {
        key: {digest: _spans(of, versions) for digest, of in shapes[key].items()}
        for key in sorted(shapes)
    }
    return spans, complaints


def _releases_in(folder: Path) -> list[Path]:
    """Other packages may lie there too."""
    return [one for one in folder.iterdir() if (one / release.PACKAGE).is_dir()]


def _may_be_absent(place: Place) -> bool:
    return isinstance(place, Target) and place.adds


def _spans(some: list[Version], every: list[Version]) -> str:
    """Write versions as spans over the releases that exist: "0.16.0-0.16.4, 0.16.6"."""
    runs: list[list[Version]] = []
    for version in some:
        if runs and every.index(version) == every.index(runs[-1][-1]) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _changes(old: Shapes, new: Shapes) -> list[str]:
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key, {}), new.get(key, {})
        lines += [f"- {key} {d} ({before[d]})" for d in before if d not in after]
        lines += [f"+ {key} {d} ({after[d]})" for d in after if d not in before]
        both = (d for d in after if d in before and before[d] != after[d])
        lines += [f"~ {key} {d} ({before[d]} -> {after[d]})" for d in both]
    return lines


def main() -> int:
    """Record one patch; returns 1, writing nothing, if a place is missing where it is claimed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("patch")
    parser.add_argument("--releases", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    patch = registry.patch(arguments.patch)
    new, complaints = record(patch, arguments.releases)
    if complaints:
        print(*complaints, sep="\n", file=sys.stderr)
        return 1
    path = shape.recorded_at(patch)
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    print(*_changes(old, new) or ["no drift"], sep="\n")
    path.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
