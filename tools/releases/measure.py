"""What the proofs come to: on the oldest and the newest release that is wrong, or on GPUs."""

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
    on_cpu = [one for one in DEFECTS if one.proof and "cuda" not in PROOFS[one.proof].only]
    wanted = [f"{one.proof} {at}" for one in on_cpu for at in ends(one)]
    wanted = [one for one in dict.fromkeys(wanted) if not names or one.split()[0] in names]
    found = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    is_bad = False
    for key, told in each(_prove, wanted):
        if told is None or len(told) != 2:
            is_bad = True
            continue
        name, at = key.split()
        found.setdefault(name, {})[at] = told
        lines = ",\n".join(f'"{name}": {json.dumps(found[name])}' for name in sorted(found))
        FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")
    return int(is_bad)


def ends(one: Defect) -> Iterator[str]:
    """The oldest and the newest release that has it, of those on which it is cured."""
    floor = Version(findings.floor(one) or RELEASES[0])
    wrong = [at for at in RELEASES if Version(at) >= floor and one.is_wrong(Version(at))]
    yield from (wrong[0], wrong[-1])


def _prove(key: str) -> dict[str, str]:
    """What stock and patched come to: how far off, or the name of an error."""
    name, at = key.split()
    if not install_one(at):
        return {}
    done = python(at, "-m", "ds_patches", "prove", name)
    told = {side: off or error for side, off, error in _TOLD.findall(done.stdout)}
    is_shown = "stock is wrong, patched is right" in done.stdout
    say(f"{key}: {told}" if is_shown else f"{key}: not shown\n{done.stdout}")
    return told if is_shown else {}


def measure_on_gpus(versions: Sequence[str]) -> int:
    """Run all proofs of these releases on GPUs, and write their columns; 1 if one does not show."""
    is_bad = False
    for at in versions:
        if not install_one(at):
            return 1
        done = python(at, "-m", "ds_patches", "prove", "--all", "--device", "cuda")
        say(done.stdout)
        is_bad |= done.returncode != 0
        write_column(at, done.stdout, stamp())
    return int(is_bad)


def write_column(at: str, printed: str, when: str) -> None:
    """Write what `prove --all` printed on a release into the page's table."""
    cells = {}
    for line in re.findall(r"^[a-z0-9-]+  +\S.*$", printed, re.M):
        name, *told = re.split("  +", line.replace("off by ", ""))
        cell = "; ".join(told[:2]).partition(":")[0]
        is_bad = "not shown" in told or "not train" in cell
        cells[name] = f"**{cell}**" if is_bad else cell
    hardware = re.findall(f"^DeepSpeed {re.escape(at)} on (.*)$", printed, re.M)
    page.write_column(PAGE, "gpus", at, {**cells, page.ON: f"{hardware[0]}; {when}"})
