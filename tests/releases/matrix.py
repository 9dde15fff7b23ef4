"""Run what is not recorded yet, release by release, and record it."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version as version_of
from pathlib import Path

from packaging.version import Version

import ds_patches
from ds_patches.core import gate, registry, release
from ds_patches.core.state import State
from tests import releases
from tests.releases import columns, each, page, record, say
from tests.releases.columns import CORE
from tests.releases.install import install_one
from tests.releases.record import Cell, Record, Records
from tests.releases.run import WHOLE, Case, Outcome, count, pytest, python

#: What the gate's refusals are to a reader. Any other state but READY says nothing about a release.
_REFUSALS = {
    State.FIXED_UPSTREAM: Cell.FIXED_UPSTREAM,
    State.OUT_OF_RANGE: Cell.NOT_APPLICABLE,
    State.SHAPE_CHANGED: Cell.REFUSED,
    State.BLOCKED: Cell.REFUSED,
    State.UNKNOWN_VERSION: Cell.REFUSED,
}


@dataclass(frozen=True)
class Answer:
    """What a process with the release on its path says of a patch.

    state, reason: the gate's, before anything was imported.
    live: whether the patch was in the call path after `apply_all()`.
    after: why it was, or was not.
    """

    state: State
    reason: str
    live: bool = False
    after: str = ""


def judge(answer: Answer | None, outcome: Outcome) -> tuple[Cell, str]:
    """A column's cell, and why it is no pass. Tests of a refused patch do not count.

    answer: a patch's; the core has none.
    """
    if answer and answer.state is not State.READY:
        return _REFUSALS.get(answer.state, Cell.UNKNOWN), answer.reason
    if answer and not answer.live:
        return Cell.FAILED, answer.after
    if outcome.trouble:
        return (Cell.FAILED if outcome.failed else Cell.UNKNOWN), outcome.trouble
    return Cell.PASS, ""


class NoAnswer(Exception):
    """Nothing could be learnt about a release; the message is what was heard instead."""


def measure(version: str, wanted: Sequence[str]) -> list[Record]:
    """Run the tests of these columns on one release; raises NoAnswer."""
    if install_one(version):
        raise NoAnswer(f"DeepSpeed {version} could not be installed")
    # Now, not afterwards: what is edited meanwhile was not tested.
    state = {column: (columns.sources(column), columns.commit(column)) for column in wanted}
    answers = ask(version)
    ready = {name for name, answer in answers.items() if answer.state is State.READY}
    outcomes = outcomes_of(version, [c for c in wanted if c in {CORE, *ready}], ready)
    found = [recorded(version, c, *state[c], answers.get(c), outcomes.get(c)) for c in wanted]
    if any(one.cell is Cell.REFUSED for one in found):
        say(python(version, "-m", "ds_patches", "doctor").stdout)
    return found


def run(
    versions: Sequence[str],
    again: bool = False,
    into: Path = record.FILE,
    measure: Callable[[str, Sequence[str]], list[Record]] = measure,
) -> int:
    """Record `versions`, or every known release; 1 when something is left to look into.

    again: also what has a settled cell from the present sources.
    The files are written after each release: whatever stops this, the same call goes on there.
    """
    torch = Version(version_of("torch")).public
    records = record.load(into)
    known = records.knowing(versions, records.looked_at).releases
    wanted = [version for version in known if version in versions or not versions]
    left = {v: columns.columns() if again else records.outstanding(v, torch) for v in wanted}
    for version in wanted:
        say(f"{version}: {', '.join(left[version]) or 'recorded already'}")

    def found(version: str) -> list[Record] | NoAnswer:
        try:
            return measure(version, left[version])
        except NoAnswer as reason:
            return reason

    outstanding = [version for version in wanted if left[version]]
    for number, (version, new) in enumerate(each(found, outstanding), start=1):
        if isinstance(new, list):
            records = _keep(new, into)
            new = ", ".join(f"{one.column} {page.cell(one)}" for one in new)
        say(f"[{number}/{len(outstanding)}] {version}: {new}")
    say(f"\n{page.table(records, [(version, torch) for version in wanted])}")
    return int(any(records.outstanding(version, torch) for version in wanted))


def _keep(new: list[Record], into: Path) -> Records:
    """Write these records and the page. Others may have been written since they were read."""
    records = record.load(into).adding(new)
    record.save(records, into)
    page.rewrite(records, into.with_suffix(".md"))
    return records


def ask(version: str) -> dict[str, Answer]:
    """What a process of that release's own says of each patch; raises NoAnswer."""
    with tempfile.TemporaryDirectory() as scratch:
        answers = Path(scratch, "answers.json")
        done = python(version, "-m", "tests.releases.matrix", str(answers))
        if done.returncode:
            raise NoAnswer(done.stdout)
        # Reasons name files; where they lie on this machine is nobody's business.
        here = json.dumps(f"{releases.folder() / version}/").strip('"')
        plain = json.loads(answers.read_text(encoding="utf-8").replace(here, ""))
    return {name: Answer(**one | {"state": State(one["state"])}) for name, one in plain.items()}


def outcomes_of(version: str, wanted: Sequence[str], ready: Collection[str]) -> dict[str, Outcome]:
    """One pytest run over the core tests of all these columns: ranks take seconds to start.

    ready: the patches that the gate lets be applied to this release.
    """
    files = columns.marked_files(path for column in wanted for path in columns.tests_of(column))
    if not files:  # pytest would take that for all there are
        return {}
    options = ("-m", "core_case", "--continue-on-collection-errors")
    code, cases = pytest(version, *options, *files)
    if code not in WHOLE:
        stopped = Outcome(version, failed=1, trouble=f"pytest stopped with code {code}")
        return dict.fromkeys(wanted, stopped)
    return {column: count(version, cases_of(column, cases, ready)) for column in wanted}


def cases_of(column: str, cases: Sequence[Case], ready: Collection[str]) -> list[Case]:
    """A column's own cases. The core's about a patch mean nothing where that one is refused."""
    homes = tuple(
        f"{path.removesuffix('.py')}/".replace("/", ".") for path in columns.tests_of(column)
    )
    refused = tuple(f"[{name}]" for name in registry.patches() if name not in ready)
    return [
        case
        for case in cases
        # A file that could not be imported is a case without a class, named as the module.
        if f"{case.attrib['classname'] or case.attrib['name']}.".startswith(homes)
        and not case.attrib["name"].endswith(refused)
    ]


def recorded(
    version: str,
    column: str,
    sources: str,
    commit: str,
    answer: Answer | None,
    outcome: Outcome | None,
) -> Record:
    """What is kept of a column; the core has no answer, an untested patch no outcome."""
    outcome = outcome or Outcome(version, trouble="no test ran")
    cell, why = judge(answer, outcome)
    patch = registry.patches().get(column)
    return Record(
        release=version,
        column=column,
        cell=cell,
        why=why,
        passed=outcome.passed,
        failed=outcome.failed,
        skipped=outcome.skipped,
        seconds=round(outcome.seconds, 1),
        supported=patch.supported if patch else "",
        fixed_in=patch.fixed_in if patch else None,
        date=date.today().isoformat(),
        python=platform.python_version(),
        torch=version_of("torch"),
        ds_patches=ds_patches.__version__,
        sources=sources,
        commit=commit,
    )


def answer(into: Path) -> None:
    """What the DeepSpeed that is first on this path lets each patch do: the fields of `Answer`.

    Into a file, because DeepSpeed prints to standard output while it is imported.
    """
    wanted, found = os.environ["DEEPSPEED_TEST_RELEASE"], release.installed()
    if found is None or found.text != wanted:
        sys.exit(f"DeepSpeed {wanted} was asked for, {found and found.text} is first on the path")
    verdicts = {name: gate.check(patch) for name, patch in registry.patches().items()}
    with suppress(ds_patches.PatchNotApplied):  # the statuses say which, and why
        ds_patches.apply_all()
    answers = {
        name: {
            "state": verdicts[name].state.value,
            "reason": verdicts[name].reason,
            "live": status.live,
            "after": status.reason,
        }
        for name, status in ds_patches.status().items()
    }
    into.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
