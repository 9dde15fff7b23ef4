"""What `doctor` has found, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from packaging.version import Version

from ds_patches.diagnostics import configuration
from ds_patches.diagnostics.defects import HARMS, OLDEST, TESTED, Defect, plain
from ds_patches.diagnostics.findings import Finding
from ds_patches.diagnostics.training import Training

#: Exit statuses: nothing that is known is wrong, or it is cured; something is; nobody could look.
SOUND, WRONG, UNKNOWN = 0, 1, 2
#: Letters of a log's line that are quoted; what depends on the script, and lines of a log.
_QUOTE, _FEW = 200, 3


@dataclass(frozen=True)
class Report:
    """All that doctor says.

    release: None if it is not known. is_told: the user or a log says so; else it is the installed
    one. unknown: lines of errors that are not known. refused: patches that do not know the code.
    """

    status: int
    case: Training
    release: Version | None
    is_told: bool
    findings: Sequence[Finding]
    unknown: Sequence[str]
    warnings: Sequence[str]
    patches: Mapping[str, str]
    refused: Sequence[str]
    drift: Sequence[str]
    startup: Sequence[str]
    environment: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "release": str(self.release or ""),
            "findings": [finding.as_json() for finding in self.findings],
            "unknown": [*self.unknown],
            "ds_patches": self.case.said,
            "warnings": [*self.warnings],
            "patches": {**self.patches},
            "start-up": [*self.startup],
            "environment": {**self.environment},
        }

    def lines(self, *, verbose: bool = False) -> Iterator[str]:
        """Yield the text: what is worst comes first."""
        yield from _wrapped("", f"{self._of()}: {self._verdict()}")
        for warning in self.warnings:
            yield from _wrapped("warning: ", warning)
        sure = [finding for finding in self.findings if not finding.is_open]
        is_open = [finding for finding in self.findings if finding.is_open]
        yield from _blocks(sure)
        for line in self.unknown[:_FEW]:
            yield from _wrapped("not known: ", line[:_QUOTE])
        for line in self.case.said[:_FEW]:
            yield from _wrapped("ds_patches says: ", line)
        few = _FEW - min(len(sure), _FEW - 1) if self.case.is_configured else 0
        yield from _depending(is_open, len(is_open) if verbose else few)
        is_asked = verbose or not (self.case.names or self.case.logs)
        if is_asked or self.refused:
            yield "patches"
            for answer in dict.fromkeys(self.patches.values()):
                names = (name for name, its in self.patches.items() if its == answer)
                yield from _wrapped("  ", f"{answer}: {', '.join(names)}")
        if verbose:
            yield from ("drift", *(f"  {text}" for text in self.drift))
        if is_asked:
            yield from ("start-up", *(f"  {text}" for text in self.startup))
            its = ", ".join(f"{name} {value}" for name, value in self.environment.items())
            yield from ("environment", *_wrapped("  ", its))

    def _of(self) -> str:
        release = f"DeepSpeed {self.release}" if self.release else "DeepSpeed (release not known)"
        release += " (installed)" * bool(self.release and not self.is_told)
        return release + f" with {', '.join(self.case.names)}" * bool(self.case.names)

    def _verdict(self) -> str:
        parts = []
        if self.status == UNKNOWN:
            old = self.release and self.release < Version(OLDEST)
            why = f"only {OLDEST} to {TESTED} were looked at" if old else "it is missing or broken"
            return f"not known, {why}; --release X.Y.Z asks about another"
        if not self.release and self.case.releases:
            named = ", ".join(map(str, self.case.releases))
            parts.append(f"the log names {named}: --release says which")
        if self.release and self.release > Version(TESTED):
            parts.append(f"newer than {TESTED}, the newest that was looked at")
        if self.refused:
            every = len(self.refused) == len(self.patches)
            parts.append(f"refused: {'every patch' if every else ', '.join(self.refused)}")
        shown = [finding for finding in self.findings if finding.is_logged]
        if self.case.logs and not shown:
            parts.append("no known defect shows in this log")
        elif shown:
            may = f"known defects that raise this: {len(shown)}"
            parts.append("its error is known" if any(f.is_sure for f in shown) else may)
        decided = [f.defect.harm for f in self.findings if not f.is_logged and not f.is_open]
        counts = ", ".join(
            f"{title}: {decided.count(harm)}" for harm, title in HARMS.items() if harm in decided
        )
        if self.case.is_configured:
            parts.append(counts or "these settings alone trigger nothing that is known")
        elif not self.case.logs:
            parts += [] if self.refused else ["no patch is refused"]
            parts.append("doctor FILE says what is wrong with your settings or your log")
        return "; ".join(parts)


def _blocks(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each finding under the title of its harm, and what helps under those it helps."""
    title, quote = "", ""
    for finding, after in zip_longest(findings, findings[1:]):
        harm = HARMS[finding.defect.harm] if finding.defect.stages else "no defect"
        if finding.is_logged and finding.evidence[0] != quote:
            quote = finding.evidence[0]
            yield from _wrapped("", f"error: {quote[:_QUOTE]}")
        elif not finding.is_logged and harm != title:
            title = harm
            yield title.upper()
        yield from _block(finding)
        if not after or (after.cure, after.is_logged) != (finding.cure, finding.is_logged):
            yield from _wrapped(
                "    do:    ", f"{plain(finding.cure.do) or 'nothing'} ({finding.cure.why})"
            )


def _block(finding: Finding) -> Iterator[str]:
    defect = finding.defect
    if finding.is_logged:
        what = "it is:  " if finding.is_sure else "may be: "
        yield from _wrapped(f"  {what}", _script(defect))
    else:
        yield from _wrapped("  ", f"{plain(defect.outcome)}: {plain(defect.script)}")
        because = "; ".join(finding.evidence)
        if finding.depends:
            because += f"; if {' and '.join(map(configuration.said, finding.depends))}"
        yield from _wrapped("    because: ", because)
    right = f"{defect.right} and later" if defect.right else f"no release up to {TESTED}"
    notes = [f"right in {right}"] * bool(defect.stages)
    notes += [f"to see it: ds-patches prove {defect.proof}"] * bool(defect.proof)
    yield from _wrapped("    ", "; ".join(notes))


def _depending(findings: Sequence[Finding], few: int) -> Iterator[str]:
    """Yield some of what depends on the script: of what ordinary scripts meet, the worst."""
    shown = sorted(findings, key=lambda finding: not finding.defect.section)[:few]
    if shown:
        yield "IF YOUR SCRIPT DOES THIS"
    for finding in shown:
        defect = finding.defect
        cure = defect.patch or plain(finding.cure.do)
        yield from _wrapped("  ", f"{_script(defect)}: {plain(defect.outcome)} -> {cure}")
    if rest := len(findings) - len(shown):
        yield f"{rest} more depend on what the script does: -v lists them"


def _script(defect: Defect) -> str:
    stages = f", ZeRO {', '.join(map(str, defect.stages))}" if defect.stages else ""
    return f"{plain(defect.script) or plain(defect.outcome)}{stages}"


def _wrapped(indent: str, text: str) -> list[str]:
    return wrap(
        text,
        width=100,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,
        break_long_words=False,
    )
