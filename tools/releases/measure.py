"""Results of the proofs, on the oldest and the newest release that is wrong, or on GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from packaging.version import Version

from ds_patches.diagnostics import findings
from ds_patches.diagnostics.defects import DEFECTS, Defect
from ds_patches.diagnostics.proofs import PROOFS
from tools.releases import RELEASES, ROOT, each, install_one, page, say
from tools.releases.record import stamp
from tools.releases.run import python

FILE = ROOT / "docs" / "measured.json"
PAGE = ROOT / "docs" / "compatibility.md"
#: Those that frameworks pin, and the newest.
ON_GPUS = ("0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.5", "0.19.8")
_TOLD = re.compile(r"^(stock|patched): +(?!no answer)(?:off by (\S+) of|(?:\w+\.)*(\w+))", re.M)


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
    done = python(version, "-m", "ds_patches", "prove", name)
    sides = {side: off or error for side, off, error in _TOLD.findall(done.stdout)}
    is_shown = "stock is wrong, patched is right" in done.stdout
    say(f"{key}: {sides}" if is_shown else f"{key}: not shown\n{done.stdout}")
    return sides if is_shown else {}


def measure_on_gpus(versions: Sequence[str]) -> int:
    """Run all proofs of these releases on GPUs, and write their columns; 1 if one does not show."""
    is_bad = False
    for version in versions:
        if not install_one(version):
            return 1
        done = python(version, "-m", "ds_patches", "prove", "--all", "--device", "cuda")
        say(done.stdout)
        is_bad |= done.returncode != 0
        write_column(version, done.stdout, stamp())
    return int(is_bad)


def write_column(version: str, printed: str, when: str) -> None:
    """Write what `prove --all` printed on a release into the page's table."""
    cells = {}
    for line in re.findall(r"^[a-z0-9-]+  +\S.*$", printed, re.M):
        name, *parts = re.split("  +", line.replace("off by ", ""))
        cell = "; ".join(parts[:2]).partition(":")[0]
        is_bad = "not shown" in parts or "not train" in cell
        cells[name] = f"**{cell}**" if is_bad else cell
    hardware = re.findall(f"^DeepSpeed {re.escape(version)} on (.*)$", printed, re.M)
    page.write_column(PAGE, "gpus", version, {**cells, page.ON: f"{hardware[0]}; {when}"})
