"""`doctor`: known defects of a configuration, a log or this environment, and their cures."""

from collections.abc import Callable
from functools import partial

from packaging.version import Version

from ds_patches.core import flags, gate, registry, release
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
    installed = release.installed()
    # A log that names no release may be of any release.
    judged = named or (installed.version if installed and not case.logs else None)
    refusals, drift, is_broken = _refusals(named, installed)
    unknown_code = "for " if named and named > Version(TESTED) else State.REFUSED.value
    refused = [name for name, reason in refusals.items() if reason.startswith(unknown_code)]
    refused = refused if named or not case.logs else []
    cure_of = partial(
        findings.cure,
        version=judged,
        refusals=refusals if judged else dict.fromkeys(refusals, ""),
        is_live=not named and diagnosis.is_armed(),
    )
    logged, unknown = _logged(case, judged, cure_of)
    reported = [*logged.values()]
    is_tested = bool(judged and judged >= Version(OLDEST))
    if is_tested and (case.is_configured or not case.logs):
        for defect in wrong_in(judged):
            depends = case.config.conditions(defect)
            is_fixed = refusals.get(defect.patch) == findings.FIXED
            if depends is not None and not is_fixed and defect not in logged:
                evidence = case.config.evidence(defect)
                reported.append(Finding(defect, cure_of(defect), evidence, depends))
    is_told = logged or (case.logs and not case.is_foreign)
    is_diagnosed = (is_tested and not is_broken) or is_told
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
        drift=drift,
    )


def _refusals(
    named: Version | None, installed: release.Release | None
) -> tuple[dict[str, str], list[str], bool]:
    """Return why each patch would not be applied, or ""; and where the installed code differs.

    The third value is True if the installed code cannot be imported.

    named: the release to judge by its number alone, instead of the installed code.
    """
    patches = registry.patches()
    reasons: dict[str, str] = {}
    drift: list[str] = []
    is_broken = False
    for name, request in flags.read(patches).by_name.items():
        supported = patches[name].supported
        if not request.wanted:
            reasons[name] = f"disabled ({request.why})"
        elif named:
            reasons[name] = "" if release.covers(supported, named) else f"for {supported}"
        else:
            verdict = gate.check(patches[name], request.force, installed)
            reason = "" if verdict.may_apply else f"{verdict.state.value}, {verdict.reason}"
            reasons[name] = findings.FIXED if verdict.is_fixed else reason
            drift += verdict.drift if verdict.state is not State.OUT_OF_RANGE else ()
            is_broken |= not verdict.release
    return reasons, drift, is_broken


def _logged(
    case: Training, version: Version | None, cure_of: Callable[[Defect], Cure]
) -> tuple[dict[Defect, Finding], list[str]]:
    """Return the findings of the errors in the logs, and the first lines of unknown errors."""
    known: dict[Defect, Finding] = {}
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
        if not wrong and has_error:
            # In a release without the defect, or an untested one, the cause is another.
            spans = {f"{defect.first} until {defect.right or TESTED}" for defect in likely}
            unknown.setdefault(
                error.line + f" (known from {', '.join(sorted(spans))})" * bool(spans)
            )
        has_one_cure = len({(defect.patch, defect.do, defect.right) for defect in wrong}) == 1
        for defect in wrong:
            is_sure = matches[defect] and has_one_cure
            if is_sure or defect not in known:
                evidence = (error.line,)
                known[defect] = Finding(defect, cure_of(defect), evidence, (), True, is_sure)
    return known, [*unknown]
