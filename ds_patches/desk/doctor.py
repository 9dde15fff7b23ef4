"""`doctor`: what this DeepSpeed gets wrong, which patches would be applied, and the environment."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from ds_patches.core import columns, flags, gate, once, registry, release
from ds_patches.core.gate import Verdict
from ds_patches.core.state import State
from ds_patches.desk import configuration, cured
from ds_patches.desk.configuration import SCRIPT
from ds_patches.desk.cured import Cure
from ds_patches.desk.defects import DEFECTS, OLDEST, TESTED, Defect, plain
from ds_patches.startup import diagnosis

#: Exit statuses: nothing is wrong here, or all is cured; something is not; nobody can tell; a patch
#: would cure what these settings meet, and nothing applies it.
SOUND, WRONG, UNKNOWN, CURABLE = 0, 1, 2, 3
_REFUSED = (State.SHAPE_CHANGED, State.UNKNOWN_VERSION)
#: What no patch cures, in the verdict.
_MOST = 3
_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


class Row(NamedTuple):
    """A defect that these settings can meet.

    depends: on which open settings, and on the script.
    is_on: whether a setting that is on, or may be, is among what brings it about.
    """

    one: Defect
    depends: tuple[str, ...]
    cure: Cure
    is_on: bool

    @property
    def is_cured(self) -> bool:
        """By a patch that is applied, or would be."""
        return self.cure.by in ("patch", "applied")

    @property
    def counts(self) -> bool:
        """Whether the settings decide alone, or would if the open ones were known."""
        return not self.depends or (SCRIPT not in self.depends and bool(self.one.patch))

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """What the settings decide comes first, and of that what no patch cures."""
        return SCRIPT in self.depends, bool(self.depends), self.is_cured

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
    seen = {name: cured.refusal(verdict) for name, verdict in verdicts.items()}
    refused = cured.of_releases(asked) if asked else seen
    answers = {name: disabled[name] or why for name, why in refused.items()}
    armed = not asked and diagnosis.is_armed()
    rows = _rows(here, facts, answers, armed) if here else []
    tested = bool(here and here >= Version(OLDEST))
    looked = {name: one.state for name, one in verdicts.items() if not disabled[name]}
    odd = [name for name, state in looked.items() if state in _REFUSED]
    is_broken = State.BROKEN in looked.values()
    status = _status(rows if config else [], odd) if tested and not is_broken else UNKNOWN
    found: dict[str, Any] = {
        "status": status,
        "release": str(here or ""),
        "rows": [one.as_json() for one in rows],
        "patches": {name: answer or "would apply" for name, answer in answers.items()},
        "warnings": [*flags.misspelt(os.environ)],
        "start-up": diagnosis.lines(),
        "environment": _environment(),
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return status
    print(f"verdict: {_verdict(status, rows, config, odd)}")
    if here:
        newest = min(here, Version(TESTED))
        told = f"{newest}, the newest that was tested," if here > newest else f"{here}"
        with_these = f" with {config}" if config else ""
        wrong = _wrong(rows, whole=verbose, alone=not config)
        _print(f"what DeepSpeed {told} gets wrong{with_these}", wrong)
    if verbose or not config or odd:
        _print("patches", _answers(found["patches"]))
    if verbose:
        near = (one for one in verdicts.values() if one.state is not State.OUT_OF_RANGE)
        _print("drift", (text for verdict in near for text in verdict.drift))
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    _print("start-up", found["start-up"])
    if verbose or not config:
        its = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
        _print("environment", [its])
    return status


def _print(title: str, lines: Iterable[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n")


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
) -> list[Row]:
    """Return what this release gets wrong with these settings."""
    found = []
    for one in DEFECTS:
        depends = configuration.conditions(one, facts)
        is_fixed = answers.get(one.patch) == cured.FIXED
        if depends is not None and one.is_wrong(here) and not is_fixed:
            cure = cured.cure(one, here, answers)
            if cure.by == "patch" and armed:
                cure = Cure("applied", f"{one.patch} cures this", cure.do)
            settings = {facts.get(name, SCRIPT) for name in one.needs.split()}
            found.append(Row(one, depends, cure, bool(settings - {SCRIPT})))
    return sorted(found, key=lambda row: row.rank)


def _status(rows: list[Row], odd: list[str]) -> int:
    """odd: patches that are refused."""
    left = {row.cure.by for row in rows if row.counts} - {"applied"}
    if odd or left - {"patch"}:
        return WRONG
    return CURABLE if left else SOUND


def _verdict(status: int, rows: list[Row], config: Path | None, odd: list[str]) -> str:
    """Count every row once."""
    if status == UNKNOWN:
        return "unknown: DeepSpeed is missing, broken or too old; --release asks about another"
    refused = f"refused: {', '.join(odd)}" if odd else "no patch is refused"
    if not config:
        return f"{refused}; --config FILE says what is wrong with your settings"
    others: dict[str, list[Row]] = {}
    for row in rows:
        if SCRIPT not in row.depends:
            others.setdefault(_condition(row), []).append(row)
    found = [refused] * bool(odd)
    found += [] if others else ["these settings alone trigger nothing that is known"]
    found += [f"{one}{said}" for said, mine in others.items() for one in _counts(mine)]
    script = len(rows) - sum(map(len, others.values()))
    return "; ".join([*found, f"{script} depend on your script"])


def _counts(rows: list[Row]) -> Iterator[str]:
    """Count what no patch cures, and by whom the rest is or would be cured."""
    if told := [row for row in rows if not row.is_cured]:
        right = max((row.one.right or TESTED for row in told), key=Version)
        helps = f"{right} is right" if all(row.one.right for row in told) else "what helps is below"
        helps = plain(told[0].cure.do) if len(told) == 1 else helps
        seen = [plain(row.one.outcome) for row in told[:_MOST]]
        seen += [f"{len(told) - _MOST} more"] * (len(told) > _MOST)
        yield f"no patch cures {len(told)}: {', '.join(seen)} ({helps})"
    for by, said in (("patch", "would cure {}, not applied"), ("applied", "cures {}")):
        if mine := [row.one.patch for row in rows if row.cure.by == by]:
            yield f"{', '.join(sorted({*mine}))} {said.format(len(mine))}"


def _answers(patches: dict[str, str]) -> Iterator[str]:
    for answer in dict.fromkeys(patches.values()):
        yield f"{answer}: {', '.join(name for name, its in patches.items() if its == answer)}"


def _wrong(rows: list[Row], *, whole: bool, alone: bool) -> Iterator[str]:
    """alone: without a configuration. What is rare then waits for `whole`, which is all.

    So do parts of what a patch cures: a row with a section has what ordinary scripts meet of it.
    """
    headings: dict[str, list[Row]] = {}
    for row in rows:
        is_told = bool(row.one.section)
        is_usual = is_told if alone else row.is_on and (is_told or not row.one.patch)
        if whole or is_usual or SCRIPT not in row.depends:
            headings.setdefault(_heading(row), []).append(row)
    for heading, mine in headings.items():
        yield f"{heading}:"
        stages = (f"ZeRO {', '.join(map(str, row.one.stages))}" for row in mine)
        cells = [*zip(stages, map(_told, mine), strict=True)] if alone else [*zip(map(_told, mine))]
        yield from (f"  {line}" for line in columns.aligned(cells))
    if rest := len(rows) - sum(map(len, headings.values())):
        yield f"{rest} more depend on your script: doctor -v"
    if not rows:
        yield "nothing that is known"


def _heading(row: Row) -> str:
    patch = row.one.patch
    said = {"patch": f"{patch}, not applied, would cure", "applied": f"{patch} cures"}
    what = said.get(row.cure.by, row.cure.said.removesuffix(" it"))
    return what + _condition(row)


def _condition(row: Row) -> str:
    """Return on what it depends, as the end of a sentence."""
    depends = [SCRIPT] if SCRIPT in row.depends else row.depends
    return ", if " * bool(depends) + " and ".join(map(configuration.said, depends))


def _told(row: Row) -> str:
    one = row.one
    add = f"; {plain(row.cure.do)}" * (not row.is_cured)
    also = f"; {plain(one.do)}" * (row.is_cured and bool(one.do))
    proof = f" (prove {one.proof})" * bool(one.proof)
    script = f"{plain(one.script)}: " * bool(one.script)
    return f"{script}{plain(one.outcome)}{add}{also}{proof}"


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {release.PACKAGE: release.told(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {k: v for k, v in sorted(os.environ.items()) if k.startswith(flags.PREFIX)}
