"""`doctor`: known defects of a configuration, a log or this environment, and their cures."""

from collections.abc import Callable
from functools import partial

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


def diagnose(case: Training, release_option: Version | None) -> Report:
    """Return the report on a training, by default with the log's or the installed release."""
    named = release_option or (case.releases[0] if len(case.releases) == 1 else None)
    verdicts, disabled = _verdicts(ask_gate=not named)
    installed = next((verdict.release for verdict in verdicts.values() if verdict.release), None)
    # A log that names no release may be of any release.
    judged = named or (None if case.logs else installed)
    refusals = {name: findings.refusal(verdict) for name, verdict in verdicts.items()}
    refusals = findings.out_of_range(named) if named else refusals
    refusals = {name: disabled[name] or reason for name, reason in refusals.items()}
    cure_of = partial(
        findings.cure,
        version=judged,
        refusals=refusals if judged else dict.fromkeys(refusals, ""),
        is_live=not named and diagnosis.is_armed(),
    )
    reported, unknown = _logged(case, judged, cure_of)
    is_tested = bool(judged and judged >= Version(OLDEST))
    if is_tested and (case.is_configured or not case.logs):
        known = {finding.defect for finding in reported}
        for defect in wrong_in(judged):
            depends = case.config.conditions(defect)
            is_fixed = refusals.get(defect.patch) == findings.FIXED
            if depends is not None and not is_fixed and defect not in known:
                evidence = case.config.evidence(defect)
                reported.append(Finding(defect, cure_of(defect), evidence, depends))
    wanted = {name: verdict for name, verdict in verdicts.items() if not disabled[name]}
    refused = [name for name, verdict in wanted.items() if verdict.state is State.REFUSED]
    refused = [] if case.logs else refused
    if named and named > Version(TESTED):
        refused = [name for name, reason in refusals.items() if reason and not disabled[name]]
    is_broken = any(not verdict.release for verdict in wanted.values())
    is_diagnosed = (is_tested and not is_broken) or (case.logs and not case.is_foreign) or reported
    is_wrong = refused or case.config.warnings or any(
        finding.counts for finding in reported if finding.is_logged or case.is_configured
    )  # fmt: skip
    return Report(
        status=(WRONG if is_wrong else SOUND) if is_diagnosed else UNKNOWN,
        case=case,
        release=judged,
        is_named=bool(named),
        findings=sorted(reported, key=lambda finding: finding.rank),
        unknown=unknown,
        patches={name: reason or "would apply" for name, reason in refusals.items()},
        refused=refused,
        drift=[text for verdict in verdicts.values() if verdict.state is not State.OUT_OF_RANGE
               for text in verdict.drift],
    )  # fmt: skip


def _verdicts(*, ask_gate: bool) -> tuple[dict[str, Verdict], dict[str, str]]:
    """Return the gate's verdict on each patch, and by patch the flag that disables it, or ""."""
    patches = registry.patches()
    requests = flags.read(patches).by_name
    disabled = {n: "" if r.wanted else f"disabled ({r.why})" for n, r in requests.items()}
    installed, judged = release.installed(), patches if ask_gate else {}
    verdicts = {n: gate.check(patch, requests[n].force, installed) for n, patch in judged.items()}
    return verdicts, disabled


def _logged(
    case: Training, version: Version | None, cure_of: Callable[[Defect], Cure]
) -> tuple[list[Finding], list[str]]:
    """Return the findings of the errors in the logs, and the first lines of unknown errors."""
    by_defect: dict[Defect, Finding] = {}
    unknown: dict[str, None] = {}
    has_error = any(logged.has_error for logged in case.logs)
    is_known = not version or Version(OLDEST) <= version <= Version(TESTED)
    for error in (error for logged in case.logs for error in logged.errors):
        matches = {
            defect: is_sure
            for defect, is_sure in messages.match(error)
            if case.config.conditions(defect) is not None
        }
        sure = [defect for defect, is_sure in matches.items() if is_sure]
        likely = [defect for defect in sure if defect.stages] or sure or [*matches]
        wrong = [
            defect for defect in likely if not defect.stages
            or (is_known and (not version or defect.is_wrong(version)))
        ]  # fmt: skip
        if not wrong:
            # In a release without the defect, or an untested one, the cause is another.
            spans = {f"{defect.first} until {defect.right or TESTED}" for defect in likely}
            known = f" (known from {', '.join(sorted(spans))})" * bool(likely)
            if error.line not in unknown and has_error:
                unknown[f"{error.line}{known}"] = None
        has_one_cure = len({(defect.patch, defect.do, defect.right) for defect in wrong}) == 1
        for defect in wrong:
            is_sure = matches[defect] and has_one_cure
            if is_sure or defect not in by_defect:
                by_defect[defect] = Finding(
                    defect, cure_of(defect), (error.line,), (), True, is_sure
                )
    return [*by_defect.values()], [*unknown]
