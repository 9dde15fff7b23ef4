"""The report of `doctor`, as JSON and as text."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from textwrap import wrap
from typing import Any

from packaging.version import Version

from ds_patches.core import flags, release
from ds_patches.diagnostics.configuration import STEPS
from ds_patches.diagnostics.defects import HARMS, OLDEST, TESTED, Defect, plain
from ds_patches.diagnostics.findings import Finding
from ds_patches.diagnostics.training import Training
from ds_patches.startup import diagnosis

#: Exit statuses: no known defect, or all are cured; something is wrong; no diagnosis.
SOUND, WRONG, UNKNOWN = 0, 1, 2
#: Characters quoted of a line; number of findings that depend on the script, and of log lines.
_QUOTE, _FEW = 200, 3
_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


@dataclass(frozen=True)
class Report:
    """The result of a diagnosis.

    release: the judged release; None if it is not known. is_named: an option or a log names it;
    else it is the installed one. unknown: lines of errors without a known defect. patches: by name,
    "would apply" or why not. refused: the patches for which the installed code is unknown. drift:
    the differences of that code.
    """

    status: int
    case: Training
    release: Version | None
    is_named: bool
    findings: Sequence[Finding]
    unknown: Sequence[str]
    patches: Mapping[str, str]
    refused: Sequence[str]
    drift: Sequence[str]

    @property
    def warnings(self) -> list[str]:
        return [*self.case.config.warnings, *flags.misspelt(os.environ)]

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "release": str(self.release or ""),
            "findings": [finding.as_json() for finding in self.findings],
            "unknown": [*self.unknown],
            "ds_patches": self.case.own_messages,
            "warnings": self.warnings,
            "patches": {**self.patches},
            "start-up": diagnosis.lines(),
            "environment": _environment(),
        }

    def lines(self, *, verbose: bool = False) -> Iterator[str]:
        """Yield the lines of the text, worst findings first."""
        subject = f"DeepSpeed {self.release or '(release not known)'}"
        subject += " (installed)" * bool(self.release and not self.is_named)
        subject += f" with {', '.join(self.case.names)}" * bool(self.case.names)
        yield from wrapped("", f"{subject}: {self._verdict()}")
        for warning in self.warnings:
            yield from wrapped("warning: ", warning)
        decided = [finding for finding in self.findings if not finding.is_open]
        open_findings = [finding for finding in self.findings if finding.is_open]
        yield from _blocks(decided)
        for line in self.unknown[:_FEW]:
            yield from wrapped("not known: ", line[:_QUOTE])
        for line in self.case.own_messages[:_FEW]:
            yield from wrapped("ds_patches says: ", line)
        few = _FEW - min(len(decided), _FEW - 1) if self.case.is_configured else 0
        yield from _depending(open_findings, len(open_findings) if verbose else few)
        has_environment = verbose or not (self.case.names or self.case.logs)
        if has_environment or self.refused:
            yield "patches"
            for answer in dict.fromkeys(self.patches.values()):
                names = (name for name, text in self.patches.items() if text == answer)
                yield from wrapped("  ", f"{answer}: {', '.join(names)}")
        if verbose:
            yield from ("drift", *(f"  {text}" for text in self.drift))
        if has_environment:
            yield from ("start-up", *(f"  {text}" for text in diagnosis.lines()))
            facts = ", ".join(f"{name} {value}" for name, value in _environment().items())
            yield from ("environment", *wrapped("  ", facts))

    def _verdict(self) -> str:
        case, release = self.case, self.release
        if self.status == UNKNOWN and not case.logs:
            is_old = release and release < Version(OLDEST)
            why = f"only {OLDEST} to {TESTED} are known" if is_old else "it is missing or broken"
            return f"no diagnosis, {why}; --release X.Y.Z names another release"
        logged = [finding for finding in self.findings if finding.is_logged]
        is_all = len(self.refused) == len(self.patches)
        is_sure = any(finding.is_sure for finding in logged)
        harms = [f.defect.harm for f in self.findings if not f.is_logged and not f.is_open]
        counts = [f"{HARMS[harm]}: {harms.count(harm)}" for harm in HARMS if harm in harms]
        is_bare = not case.logs and not case.is_configured
        parts = {
            f"the log names {', '.join(map(str, case.releases))}: choose one with --release":
                not release and case.releases,
            f"newer than {TESTED}, the newest that is known": release and release > Version(TESTED),
            f"refused: {'every patch' if is_all else ', '.join(self.refused)}": self.refused,
            "its error is known": is_sure,
            f"known defects that raise this: {len(logged)}": logged and not is_sure,
            "nothing to judge here: no line of DeepSpeed's":
                case.logs and not logged and case.is_foreign,
            "no known defect in this log": case.logs and not logged and not case.is_foreign,
            ", ".join(counts) or "no known defect from these settings alone": case.is_configured,
            "no patch is refused": is_bare and not self.refused,
            "doctor FILE diagnoses your settings or your log": is_bare,
        }  # fmt: skip
        return "; ".join(text for text, is_said in parts.items() if is_said)


def _blocks(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield findings under the line of the log, or under the title of their harm."""
    title = ""
    for finding in findings:
        defect, above = finding.defect, title
        if finding.is_logged:
            title = f"error: {finding.evidence[0][:_QUOTE]}"
        else:
            title = HARMS[defect.harm].upper()
        if title != above:
            yield from wrapped("", title)
        if finding.is_logged:
            label = "it is:  " if finding.is_sure else "may be: "
            yield from wrapped(f"  {label}", _script(defect))
        else:
            yield from wrapped("  ", f"{plain(defect.outcome)}: {plain(defect.script)}")
            values = ((name, "above 1" if name == STEPS else "on") for name in finding.depends)
            condition = f"; if {' and '.join(map(' is '.join, values))}" * bool(finding.depends)
            yield from wrapped("    because: ", "; ".join(finding.evidence) + condition)
        right = f"{defect.right} and later" if defect.right else f"no release up to {TESTED}"
        notes = [f"right in {right}"] * bool(defect.stages)
        notes += [f"to see it: ds-patches prove {defect.proof}"] * bool(defect.proof)
        yield from wrapped("    ", "; ".join(notes))
        cure = finding.cure
        yield from wrapped("    do:    ", f"{plain(cure.do) or 'nothing'} ({cure.why})")


def _depending(findings: Sequence[Finding], limit: int) -> Iterator[str]:
    """Yield `limit` findings that depend on the script, those of ordinary scripts first."""
    listed = sorted(findings, key=lambda finding: not finding.defect.section)[:limit]
    if listed:
        yield "IF YOUR SCRIPT DOES THIS"
    for finding in listed:
        defect = finding.defect
        cure = defect.patch or plain(finding.cure.do)
        yield from wrapped("  ", f"{_script(defect)}: {plain(defect.outcome)} -> {cure}")
    if rest := len(findings) - len(listed):
        yield f"{rest} more depend on what the script does: -v lists them"


def _script(defect: Defect) -> str:
    stages = f", ZeRO {', '.join(map(str, defect.stages))}" if defect.stages else ""
    return f"{plain(defect.script) or plain(defect.outcome)}{stages}"


def wrapped(indent: str, text: str) -> list[str]:
    """Return the lines of a text, of at most 100 characters where its words allow that."""
    below = f"\n{' ' * len(indent)}"
    lines = wrap(text, 100 - len(indent), break_on_hyphens=False, break_long_words=False)
    return f"{indent}{below.join(lines)}".split("\n") if lines else []


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {release.PACKAGE: release.version_text(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {k: v for k, v in sorted(os.environ.items()) if k.startswith(flags.PREFIX)}
