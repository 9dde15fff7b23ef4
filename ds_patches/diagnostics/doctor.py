"""`doctor`: which known defects a configuration can meet, or a log shows, and what helps."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ds_patches.core import flags, gate, registry, release
from ds_patches.core.gate import Verdict
from ds_patches.core.state import State
from ds_patches.diagnostics import findings, messages
from ds_patches.diagnostics.defects import OLDEST, TESTED, Defect, wrong_in
from ds_patches.diagnostics.findings import Cure, Finding
from ds_patches.diagnostics.report import SOUND, UNKNOWN, WRONG, Report
from ds_patches.diagnostics.training import Training
from ds_patches.startup import diagnosis

_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


def diagnose(case: Training, asked: Version | None) -> Report:
    """Return what is wrong. asked: the release, where it is not the installed one."""
    told = asked or (case.releases[0] if len(case.releases) == 1 else None)
    verdicts, disabled = _verdicts(look=not told)
    installed = next((verdict.release for verdict in verdicts.values() if verdict.release), None)
    # A log that names no release may be of any; a configuration is for the one that is here.
    here = told or (None if case.logs else installed)
    judged = {name: findings.refusal(verdict) for name, verdict in verdicts.items()}
    refusals = findings.of_release(told) if told else judged
    answers = {name: disabled[name] or why for name, why in refusals.items()}
    helps = partial(
        findings.cure,
        version=here,
        answers=answers if here else dict.fromkeys(answers, ""),
        is_applied=not told and diagnosis.is_armed(),
    )
    shown, unknown = _logged(case, here, helps)
    is_tested = bool(here and here >= Version(OLDEST))
    if is_tested and (case.is_configured or not case.logs):
        known = {finding.defect for finding in shown}
        for defect in wrong_in(here):
            depends = case.config.conditions(defect)
            is_fixed = answers.get(defect.patch) == findings.FIXED
            if depends is not None and not is_fixed and defect not in known:
                evidence = case.config.evidence(defect)
                shown.append(Finding(defect, helps(defect), evidence, depends))
    asked_for = {name: verdict for name, verdict in verdicts.items() if not disabled[name]}
    refused = [name for name, verdict in asked_for.items() if verdict.state is State.REFUSED]
    odd = [] if case.logs else refused
    if told and told > Version(TESTED):
        odd = [name for name, why in answers.items() if why and not disabled[name]]
    is_broken = any(not verdict.release for verdict in asked_for.values())
    looked = (is_tested and not is_broken) or bool(case.logs)
    is_wrong = odd or case.config.warnings or any(
        finding.counts for finding in shown if finding.is_logged or case.is_configured
    )  # fmt: skip
    return Report(
        status=(WRONG if is_wrong else SOUND) if looked else UNKNOWN,
        case=case,
        release=here,
        is_told=bool(told),
        findings=sorted(shown, key=lambda finding: finding.rank),
        unknown=unknown,
        warnings=[*case.config.warnings, *flags.misspelt(os.environ)],
        patches={name: why or "would apply" for name, why in answers.items()},
        refused=odd,
        drift=[text for verdict in verdicts.values() if verdict.state is not State.OUT_OF_RANGE
               for text in verdict.drift],
        startup=diagnosis.lines(),
        environment=_environment(),
    )  # fmt: skip


def _verdicts(*, look: bool) -> tuple[dict[str, Verdict], dict[str, str]]:
    """Return the gate's verdict on each patch, and for those that are left out by whom."""
    patches = registry.patches()
    requests = flags.read(patches).by_name
    disabled = {n: "" if r.wanted else f"disabled ({r.why})" for n, r in requests.items()}
    installed, seen = release.installed(), patches if look else {}
    verdicts = {n: gate.check(patch, requests[n].force, installed) for n, patch in seen.items()}
    return verdicts, disabled


def _logged(
    case: Training, version: Version | None, helps: Callable[[Defect], Cure]
) -> tuple[list[Finding], list[str]]:
    """Return what the errors of the logs show, and the lines of those that are not known."""
    shown: dict[Defect, Finding] = {}
    unknown: dict[str, None] = {}
    has_error = any(logged.has_error for logged in case.logs)
    is_known = not version or Version(OLDEST) <= version <= Version(TESTED)
    for error in (error for logged in case.logs for error in logged.errors):
        rows = {
            defect: is_sure
            for defect, is_sure in messages.show(error)
            if case.config.conditions(defect) is not None
        }
        sure = [defect for defect, is_sure in rows.items() if is_sure]
        likely = [defect for defect in sure if defect.stages] or sure or [*rows]
        wrong = [
            defect for defect in likely if not defect.stages
            or (is_known and (not version or defect.is_wrong(version)))
        ]  # fmt: skip
        if not wrong:
            # A release that is right, or was not tested, raises it for another reason.
            spans = {f"{defect.first} until {defect.right or TESTED}" for defect in likely}
            known = f" (known from {', '.join(sorted(spans))})" * bool(likely)
            if error.line not in unknown and has_error:
                unknown[f"{error.line}{known}"] = None
        is_one = len({(defect.patch, defect.do, defect.right) for defect in wrong}) == 1
        for defect in wrong:
            finding = Finding(defect, helps(defect), (error.line,), is_logged=True)
            shown.setdefault(defect, replace(finding, is_sure=rows[defect] and is_one))
    return [*shown.values()], [*unknown]


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {release.PACKAGE: release.version_text(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {k: v for k, v in sorted(os.environ.items()) if k.startswith(flags.PREFIX)}
