"""Results of the proofs, on the oldest and the newest release that is wrong, or on GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from ds_patches.diagnostics import findings, prove
from ds_patches.diagnostics.defects import DEFECTS, Defect
from ds_patches.diagnostics.proofs import PROOFS
from tools.releases import RELEASES, ROOT, each, install_one, page, say
from tools.releases.record import stamp
from tools.releases.run import python

FILE = ROOT / "docs" / "measured.json"
PAGE = ROOT / "docs" / "compatibility.md"
#: Those that frameworks pin, and the newest.
ON_GPUS = ("0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.5", "0.19.8")


def measure(names: Sequence[str]) -> int:
    """Run `prove` for these proofs, or all; 1 if patched is not right, or stock is, in one."""
    on_cpu = [d for d in DEFECTS if d.proof and "cuda" not in PROOFS[d.proof].only]
    wanted = [f"{defect.proof} {version}" for defect in on_cpu for version in ends(defect)]
    wanted = [key for key in dict.fromkeys(wanted) if not names or key.split()[0] in names]
    measured = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    is_bad = False
    for key, sides in each(_prove, wanted):
        if sides is None or len(sides) != 2:
            is_bad = True
            continue
        name, version = key.split()
        measured.setdefault(name, {})[version] = sides
        lines = ",\n".join(f'"{name}": {json.dumps(measured[name])}' for name in sorted(measured))
        FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")
    return int(is_bad)


def ends(defect: Defect) -> Iterator[str]:
    """The oldest and the newest release that has it, of those on which it is cured."""
    floor = Version(findings.floor(defect) or RELEASES[0])
    wrong = [v for v in RELEASES if Version(v) >= floor and defect.is_wrong(Version(v))]
    yield from (wrong[0], wrong[-1])


def _prove(key: str) -> dict[str, str]:
    """Return for stock and patched how far off they are, or the name of an error."""
    name, version = key.split()
    if not install_one(version):
        return {}
    sides = results_of(version, name)
    is_shown = [sides[side]["right"] for side in ("stock", "patched")] == [False, True]
    say(f"{key}: {sides if is_shown else f'not shown, {sides}'}")
    return {side: brief(sides[side]) for side in ("stock", "patched")} if is_shown else {}


def brief(side: Mapping[str, str]) -> str:
    """Return the name of a side's error, or how far off it is."""
    return prove.name_of(side["error"]) or f"{float(side['off']):.2g}"


def results_of(version: str, *words: str) -> Any:
    """Return the results of `prove` in a release, or the text of its error."""
    printed = python(version, "-m", "ds_patches", "prove", *words, "--json").stdout
    answer, _ = json.JSONDecoder().raw_decode(printed, max(0, printed.find("{")))
    return answer.get("results") or answer["error"]


def measure_on_gpus(versions: Sequence[str]) -> int:
    """Run all proofs of these releases on GPUs, and write their columns; 1 if one does not show."""
    is_bad = False
    for version in versions:
        if not install_one(version):
            return 1
        rows = results_of(version, "--all", "--device", "cuda")
        say(f"{version}: {rows}")
        is_bad |= not all(row["shown"] for row in rows)
        write_column(version, rows, f"{prove.hardware('cuda')}; {stamp()}")
    return int(is_bad)


def write_column(version: str, rows: Sequence[Mapping[str, Any]], ran: str) -> None:
    """Write a release's cells into the page's table. rows: the results of `prove --all --json`."""
    column = {}
    for row in rows:
        text = "; ".join(row["sides"]).replace("off by ", "").partition(":")[0]
        column[row["name"]] = text if row["shown"] else f"**{text}**"
    page.write_column(PAGE, "gpus", version, {**column, page.ON: ran})
