"""The table of core cases in docs/compatibility.md."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version as version_of

from packaging.version import Version

import ds_patches
from tools.releases import ROOT, each, git, install_one, page, say
from tools.releases.run import CORE_TESTS, pytest, python, tests_of

FILE = ROOT / "docs" / "compatibility.md"
CORE = "core"
LAST = "recorded"
#: Of pytest: all passed, some failed, none was there. After any other its report is not whole.
WHOLE = (0, 1, 5)
#: What a case of the report holds that went wrong.
BAD = ("failure", "error")
#: What a process that has the release says of its patches; DeepSpeed prints as well at its import.
ASKED = """
import json, ds_patches
try:
    ds_patches.apply_all(only=ds_patches.names())
except ds_patches.PatchNotApplied:
    pass  # the statuses say which, and why
found = ds_patches.status().items()
states = {name: ("live" if one.live else one.state.value, one.reason) for name, one in found}
print("states", json.dumps(states))
"""

#: A release and a torch.
Key = tuple[str, str]
#: By column.
Row = Mapping[str, str]


def columns() -> list[str]:
    return [CORE, *ds_patches.names()]


def folders_of(column: str) -> tuple[str, ...]:
    return CORE_TESTS if column == CORE else (tests_of(column),)


def record(versions: Sequence[str], only: Sequence[str] | None = None) -> int:
    """Run the core cases on these releases, and write their rows; 1 if a cell calls for a look.

    only: of the columns; the others keep their cells.
    """
    torch, now = Version(version_of("torch")).public, stamp()
    for version, cells in each(lambda version: measure(version, only or columns()), versions):
        rows = read()  # two releases run at a time
        before = rows.get((version, torch), {}) if only else {}
        when = ", ".join(dict.fromkeys(filter(None, [before.get(LAST), now])))
        rows[version, torch] = {**before, **(cells or {}), LAST: when}
        write(rows)
        say(f"{version}: {cells}")
    return int(any("**" in cell for v in versions for cell in read()[v, torch].values()))


def measure(version: str, wanted: Sequence[str]) -> Row:
    """Their cells: how many tests passed where the patch is live, or why it is not."""
    if not install_one(version):
        return dict.fromkeys(wanted, "**not installed**")
    states = states_of(version)
    folders = [path for column in wanted for path in folders_of(column)]
    code, cases = pytest(version, "-m", "core_case", "--continue-on-collection-errors", *folders)
    cells = {}
    for column in wanted:
        # A file that could not be imported is a case without a class, named as the module.
        homes = tuple(f"{path}/".replace("/", ".") for path in folders_of(column))
        own = [c for c in cases if f"{c.get('classname') or c.get('name')}.".startswith(homes)]
        passed = sum(all(c.find(end) is None for end in (*BAD, "skipped")) for c in own)
        failed = any(c.find(end) is not None for c in own for end in BAD)
        state, _ = states.get(column, ("live", ""))
        if state != "live":
            cells[column] = state if state == "out of range" else f"**{state}**"
        elif failed or not passed or code not in WHOLE:
            cells[column] = "**failed**" if failed else "**unknown**"
        else:
            cells[column] = f"pass ({passed})"
    return cells


def states_of(version: str) -> dict[str, tuple[str, str]]:
    """Return for each patch on a release "live", or its state after `apply_all()`; and why."""
    printed = python(version, "-c", ASKED).stdout
    match = re.findall("^states (.+)$", printed, re.MULTILINE)
    assert match, printed
    return {name: (state, reason) for name, (state, reason) in json.loads(match[0]).items()}


def read() -> dict[Key, Row]:
    """Return the page's rows."""
    head, *rows = page.read(FILE, LAST)
    return {(row[0], row[1]): dict(zip(head[2:], row[2:], strict=True)) for row in rows}


def write(rows: Mapping[Key, Row]) -> None:
    """Write the page's rows, the newest release first."""
    order = sorted(rows, key=lambda key: [*map(Version, key)], reverse=True)
    shown = [*columns(), LAST]
    body = [[*key, *(rows[key].get(column, "-") for column in shown)] for key in order]
    page.write(FILE, LAST, ["DeepSpeed", "torch", *shown], body)


def stamp() -> str:
    """Today and the commit, with a + when the patches or the tests are in another state."""
    changed = git("status", "--porcelain", "--", "ds_patches", "tests")
    return f"{date.today()} {git('rev-parse', '--short', 'HEAD')}{'+' * bool(changed)}"
