"""`doctor`: the environment, what would be applied and why not, and what is wrong here."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.commands import configuration, locks, symptoms
from ds_patches.core import columns, flags, gate, registry, release, shape
from ds_patches.core.gate import Verdict
from ds_patches.core.state import State
from ds_patches.startup import diagnosis
from ds_patches.symptoms import SYMPTOMS, TESTED

#: Nothing is wrong here, or all is cured; something is not; nobody can tell.
SOUND, WRONG, UNKNOWN = 0, 1, 2
_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


def diagnose(config: Path | None, *, verbose: bool, as_json: bool) -> int:
    """Print the picture, of a configuration if there is one; returns the exit status."""
    facts = configuration.read(config) if config else {}
    verdicts, disabled = _verdicts()
    treated_as = next((one.release for one in verdicts.values() if one.release), None)
    answers = {
        name: disabled[name] or ("" if one.may_apply else f"{one.state.value}, {one.reason}")
        for name, one in verdicts.items()
    }
    rows = [*_rows(treated_as, facts, answers)] if treated_as else []
    found: dict[str, Any] = {
        "environment": _environment(),
        "patches": {name: answer or "would apply" for name, answer in answers.items()},
        "wrong": rows,
        "start-up": diagnosis.lines(),
        "warnings": locks.lines(os.environ),
    }
    status = _status(verdicts, disabled, rows)
    if as_json:
        print(json.dumps(found | {"status": status}, indent=2))
    else:
        print("\n".join(_text(found, verdicts, treated_as, config, verbose)))
    return status


def _verdicts() -> tuple[dict[str, Verdict], dict[str, str]]:
    """Return the gate's word on each patch, and for those that are left out by whom."""
    patches = registry.patches()
    requests = flags.read(patches).of
    disabled = {n: "" if one.wanted else f"disabled ({one.why})" for n, one in requests.items()}
    return {n: gate.check(patch, requests[n].force) for n, patch in patches.items()}, disabled


def _rows(here: Version, facts: configuration.Facts, answers: dict[str, str]) -> Iterator[Any]:
    """Yield what this release gets wrong with these settings; "applies" is None with a script."""
    for one in SYMPTOMS:
        applies = configuration.applies(one, facts)
        if applies is not False and symptoms.is_wrong(one, here):
            cure = symptoms.cure(one, here, answers)
            yield {
                "stages": list(one.stages),
                "script": symptoms.plain(one.script),
                "outcome": symptoms.plain(one.outcome),
                "applies": applies,
                "cure": cure.by,
                "said": cure.said,
                "do": symptoms.plain(cure.do),
            }


def _status(verdicts: dict[str, Verdict], disabled: dict[str, str], rows: list[Any]) -> int:
    wanted = [one for name, one in verdicts.items() if not disabled[name]]
    broken = any(one.reason.startswith("the import of ") for one in wanted)
    if broken or any(one.state is State.NOT_INSTALLED for one in verdicts.values()):
        return UNKNOWN
    refused = (State.BROKEN, State.SHAPE_CHANGED, State.UNKNOWN_VERSION)
    bad = any(one.state in refused for one in wanted)
    return WRONG if bad or any(one["applies"] and one["cure"] != "patch" for one in rows) else SOUND


def _text(
    found: dict[str, Any], verdicts: dict[str, Verdict], here: Version | None, config: Path | None,
    verbose: bool,
) -> Iterator[str]:  # fmt: skip
    yield from _titled("environment", columns.aligned([*found["environment"].items()]))
    yield from _titled("patches", columns.aligned([*found["patches"].items()]))
    if verbose:
        yield from _titled("drift", _drift(verdicts))
    if here:
        newest = min(here, Version(TESTED))
        told = f"DeepSpeed {newest}" + ", the newest that was tested," * (newest < here)
        yield from _titled(f"what {told} gets wrong" + f" with {config}" * bool(config), [])
        yield from _wrong(found["wrong"], whole=verbose or not config)
    yield from _titled("start-up", found["start-up"])
    yield from (f"warning: {line}" for line in found["warnings"])


def _wrong(rows: list[Any], *, whole: bool) -> Iterator[str]:
    """whole: also what depends on the script, and is cured."""
    shown = [one for one in rows if whole or one["applies"] or one["cure"] != "patch"]
    headings = [one["said"] + ", if the script does it" * (not one["applies"]) for one in shown]
    for heading in dict.fromkeys(headings):
        yield f"  {heading}:"
        mine = [one for one, its in zip(shown, headings, strict=True) if its == heading]
        cells = [(f"ZeRO {', '.join(map(str, one['stages']))}", _told(one)) for one in mine]
        yield from (f"    {line}" for line in columns.aligned(cells))
    if rest := len(rows) - len(shown):
        yield f"  cured, if the script does it: {rest} more, which doctor -v lists"
    if not rows:
        yield "  nothing that is known"


def _told(one: Any) -> str:
    add = f"; {one['do']}" * (one["cure"] != "patch" or ", and " in one["do"])
    return f"{one['script']}: {one['outcome']}{add}"


def _drift(verdicts: dict[str, Verdict]) -> Iterator[str]:
    for name, verdict in verdicts.items():
        for drift in verdict.drift if verdict.state is not State.OUT_OF_RANGE else ():
            yield f"{drift.place.key}" + f" ({drift.origin})" * bool(drift.origin)
            yield f"  found {drift.found}"
            spans = shape.known(registry.patch(name)).get(drift.place.key, {})
            yield from (f"  known {digest}  {releases}" for digest, releases in spans.items())


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (title, *(f"  {line}" for line in lines))


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {release.PACKAGE: release.told(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {k: v for k, v in sorted(os.environ.items()) if k.startswith(flags.PREFIX)}
