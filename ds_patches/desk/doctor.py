"""`doctor`: what this DeepSpeed gets wrong, which patches would be applied, and the environment."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from ds_patches.core import columns, flags, gate, once, registry, release
from ds_patches.core.gate import Verdict
from ds_patches.core.state import State
from ds_patches.desk import configuration, cured, ledger
from ds_patches.desk.configuration import SCRIPT
from ds_patches.desk.cured import Cure
from ds_patches.desk.ledger import Fix
from ds_patches.desk.row import Symptom, plain
from ds_patches.desk.symptoms import OLDEST, SYMPTOMS, TESTED
from ds_patches.startup import diagnosis

#: Exit statuses: nothing is wrong here, or all is cured; something is not; nobody can tell; a patch
#: would cure what these settings meet, and nothing applies it.
SOUND, WRONG, UNKNOWN, CURABLE = 0, 1, 2, 3
_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


class Row(NamedTuple):
    """A symptom that these settings can meet.

    depends: on which open settings, and on the script.
    """

    one: Symptom
    depends: tuple[str, ...]
    cure: Cure

    @property
    def counts(self) -> bool:
        """Whether the settings decide alone, or would if the open ones were known."""
        return not self.depends or (SCRIPT not in self.depends and bool(self.one.patch))

    def as_json(self) -> dict[str, Any]:
        found = {"state": self.cure.by, "depends": self.depends, "do": plain(self.cure.do)}
        return self.one.as_json() | found


def diagnose(config: Path | None, asked: Version | None, *, verbose: bool, as_json: bool) -> int:
    """Print the picture, of a configuration if there is one; returns the exit status.

    asked: the release, where it is not the installed one.
    """
    facts = configuration.read(config) if config else {}
    verdicts, disabled = _verdicts(look=not asked)
    here = asked or next((one.release for one in verdicts.values() if one.release), None)
    refused = {name: cured.refusal(verdict) for name, verdict in verdicts.items()}
    if asked:
        refused = cured.of_releases(asked)
    answers = {name: disabled[name] or why for name, why in refused.items()}
    armed = not asked and diagnosis.is_armed()
    rows = [*_rows(here, facts, answers, armed)] if here else []
    later = ledger.concerning(here, facts) if here else []
    tested = bool(here and here >= Version(OLDEST))
    status = _status(verdicts, disabled, rows, config) if tested else UNKNOWN
    found: dict[str, Any] = {
        "status": status,
        "release": str(here or ""),
        "rows": [one.as_json() for one in rows],
        "later_fixes": [asdict(one) for one in later],
        "patches": {name: answer or "would apply" for name, answer in answers.items()},
        "warnings": [*flags.misspelt(os.environ)],
        "start-up": diagnosis.lines(),
        "environment": _environment(),
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return status
    print(f"verdict: {_verdict(status, rows, config)}")
    if here:
        newest = min(here, Version(TESTED))
        told = f"{newest}, the newest that was tested," if here > newest else f"{here}"
        with_these = f" with {config}" if config else ""
        print(f"what DeepSpeed {told} gets wrong{with_these}")
        _print(_wrong(rows, whole=verbose or not config))
        print("fixes of later releases")
        _print(_later(later, verbose))
    print("patches")
    _print(_answers(found["patches"]))
    if verbose:
        print("drift")
        seen = (one for one in verdicts.values() if one.state is not State.OUT_OF_RANGE)
        _print(text for verdict in seen for text in verdict.drift)
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    print("start-up")
    _print(found["start-up"])
    print("environment")
    _print([", ".join(f"{name} {value}" for name, value in found["environment"].items())])
    return status


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {line}")


def _verdicts(*, look: bool) -> tuple[dict[str, Verdict], dict[str, str]]:
    """Return the gate's word on each patch, and for those that are left out by whom."""
    patches = registry.patches()
    requests = flags.read(patches).of
    disabled = {n: "" if one.wanted else f"disabled ({one.why})" for n, one in requests.items()}
    with once.call():
        seen = patches if look else {}
        verdicts = {n: gate.check(patch, requests[n].force) for n, patch in seen.items()}
    return verdicts, disabled


def _rows(
    here: Version, facts: configuration.Facts, answers: dict[str, str], armed: bool
) -> Iterator[Row]:
    """Yield what this release gets wrong with these settings: what they decide alone first."""
    found = []
    for one in SYMPTOMS:
        depends = configuration.conditions(one, facts)
        if depends is not None and one.is_wrong(here):
            cure = cured.cure(one, here, answers)
            if cure.by == "patch" and armed:
                cure = Cure("applied", f"{one.patch} cures this", cure.do)
            found.append(Row(one, depends, cure))
    yield from sorted(found, key=lambda row: (SCRIPT in row.depends, bool(row.depends)))


def _status(
    verdicts: dict[str, Verdict], disabled: dict[str, str], rows: list[Row], config: Path | None
) -> int:
    states = {one.state for name, one in verdicts.items() if not disabled[name]}
    left = {row.cure.by for row in rows if row.counts} - {"applied"}
    if State.BROKEN in states:
        return UNKNOWN
    if states & {State.SHAPE_CHANGED, State.UNKNOWN_VERSION} or left - {"patch"}:
        return WRONG
    return CURABLE if left and config else SOUND


def _verdict(status: int, rows: list[Row], config: Path | None) -> str:
    if status == UNKNOWN:
        return "unknown: DeepSpeed is missing, broken or too old; --release asks about another"
    if status == WRONG:
        return "something is wrong here that no patch cures, or a patch is refused"
    if status == CURABLE:
        patches = {row.one.patch for row in rows if row.counts and row.cure.by == "patch"}
        names = ", ".join(sorted(patches))
        return f"{names} would cure what these settings can trigger; not applied"
    if not config:
        return "no patch is refused; --config FILE says what is wrong with your settings"
    return "these settings alone trigger no defect that is not cured"


def _answers(patches: dict[str, str]) -> Iterator[str]:
    for answer in dict.fromkeys(patches.values()):
        yield f"{answer}: {', '.join(name for name, its in patches.items() if its == answer)}"


def _wrong(rows: list[Row], *, whole: bool) -> Iterator[str]:
    """whole: also what depends on the script, and would be cured."""
    headings: dict[str, list[Row]] = {}
    for row in rows:
        if whole or SCRIPT not in row.depends or row.cure.by not in ("patch", "applied"):
            headings.setdefault(_heading(row), []).append(row)
    for heading, mine in headings.items():
        yield f"{heading}:"
        cells = [(f"ZeRO {', '.join(map(str, row.one.stages))}", _told(row)) for row in mine]
        yield from (f"  {line}" for line in columns.aligned(cells))
    if rest := len(rows) - sum(map(len, headings.values())):
        yield f"{rest} more depend on your script: doctor -v"
    if not rows:
        yield "nothing that is known"


def _later(fixes: list[Fix], verbose: bool) -> Iterator[str]:
    """Count the fixes that the release lacks, or tell them."""
    cured = sum(bool(one.by) for one in fixes)
    more = "" if verbose else "; doctor -v lists them"
    yield f"{len(fixes)} may concern you; cured by patches: {cured}{more}"
    for one in fixes if verbose else ():
        helps = f"cured by {one.by}" if one.by else f"right in {one.right}"
        where = ", ".join(one.needs.split()).replace("_", " ")
        told = f"{where}{': ' * bool(where)}{one.seen} ({helps}{'; ' * bool(one.do)}{one.do})"
        yield f"  {plain(told)}"


def _heading(row: Row) -> str:
    depends = [SCRIPT] if SCRIPT in row.depends else row.depends
    condition = " and ".join(map(configuration.said, depends))
    applied = ", not applied" * (row.cure.by == "patch")
    return f"{f'if {condition}: ' if condition else ''}{row.cure.said}{applied}"


def _told(row: Row) -> str:
    add = f"; {plain(row.cure.do)}" * (row.cure.by not in ("patch", "applied"))
    also = f"; {plain(row.one.add)}" * (not add and bool(row.one.add))
    proof = f" (prove {row.one.proof})" * bool(row.one.proof)
    return f"{plain(row.one.script)}: {plain(row.one.outcome)}{add}{also}{proof}"


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {release.PACKAGE: release.told(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {k: v for k, v in sorted(os.environ.items()) if k.startswith(flags.PREFIX)}
