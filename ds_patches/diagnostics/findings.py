"""A finding: a defect that a training meets, what shows it, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import gate, registry, release
from ds_patches.diagnostics.defects import HARMS, TESTED, Defect, plain

#: The one command, and what stands for it in a script.
APPLY = "ds-patches run -- torchrun train.py"
#: On what a finding depends: an open setting, or this.
SCRIPT = "script"
#: Why a patch would not be applied: a build has the fix of a later release.
FIXED = "not needed: what it cures is fixed here"


@dataclass(frozen=True)
class Cure:
    """What helps in one release. by: "patch", "applied", "setting", "upgrade" or "nothing"."""

    by: str
    why: str
    do: str


@dataclass(frozen=True)
class Finding:
    """A defect of a training.

    evidence: the settings that bring it about, or the line of a log that shows it.
    depends: the open settings on which it depends, and SCRIPT. is_sure: of a log, the traceback
    shows this defect; else the message may be another's, too.
    """

    defect: Defect
    cure: Cure
    evidence: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    is_logged: bool = False
    is_sure: bool = True

    @property
    def is_open(self) -> bool:
        """True if the script decides, too."""
        return SCRIPT in self.depends

    @property
    def counts(self) -> bool:
        """True if something is wrong, as far as anybody can tell without the script."""
        harmful = self.defect.harm != "cost" and bool(self.defect.stages)
        return harmful and self.cure.by != "applied" and not self.is_open

    @property
    def rank(self) -> tuple[bool, bool, int, bool]:
        """What a log shows comes first, then what settings decide; of those the worst."""
        harm = [*HARMS].index(self.defect.harm) if self.defect.stages else len(HARMS)
        return not self.is_logged, self.is_open, harm, bool(self.depends)

    def as_json(self) -> dict[str, Any]:
        defect, cure = self.defect, self.cure
        return {
            "script": plain(defect.script),
            "outcome": plain(defect.outcome),
            "harm": defect.harm,
            "stages": defect.stages,
            "first": defect.first,
            "patch": defect.patch,
            "proof": defect.proof,
            "right": defect.right or None,
            "section": defect.anchor,
            "evidence": self.evidence,
            "depends": self.depends,
            "sure": self.is_sure,
            "cure": cure.by,
            "why": cure.why,
            "do": plain(cure.do),
        }


def cure(
    defect: Defect, version: Version | None, answers: Mapping[str, str], *, is_applied: bool = False
) -> Cure:
    """Return what helps where a release is wrong; version: None if it is not known.

    answers: for each patch, why it would not be applied; nothing if it would. is_applied: it is.
    """
    if not defect.stages:
        return Cure("setting", "no defect of DeepSpeed", defect.do)
    why = answers.get(defect.patch, "not installed") if defect.patch else ""
    if defect.patch and not why and is_applied:
        return Cure("applied", f"{defect.patch} fixes this, and is applied", defect.do)
    if defect.patch and not why:
        also = f"; and {defect.do}" if defect.do else ""
        why = f"{defect.patch} fixes this; not applied"
        return Cure("patch", why, f"{APPLY}{also}")
    ends = [end for end in (defect.right, floor(defect)) if end]
    ends = [end for end in ends if not version or Version(end) > version]
    better = min(ends, key=Version, default="")
    upgrade = f"upgrade DeepSpeed to {better} or later" if better else ""
    if better and better != defect.right:
        upgrade += f", and apply {defect.patch}"  # which is for no older one
    said = f"{defect.patch} is {why}" if why else "no patch fixes this"
    if defect.do and not defect.patch:
        return Cure("setting", said, " or ".join(filter(None, (defect.do, upgrade))))
    if upgrade:
        return Cure("upgrade", said, upgrade)
    if why and version and version > Version(TESTED):
        return Cure("nothing", said, f"DeepSpeed {TESTED} with {defect.patch} is right")
    return Cure("nothing", said, "not known: no release or setting that helps")


def floor(defect: Defect) -> str:
    """Return from when on the patch is for the releases that are wrong, if not from the first."""
    if not (patch := registry.patches().get(defect.patch)):
        return ""
    supported = SpecifierSet(patch.supported)
    first = next((spec.version for spec in supported if spec.operator == ">="), defect.first)
    return first if Version(first) > Version(defect.first) else ""


def of_release(version: Version) -> dict[str, str]:
    """Return for each patch why a release is not one of its; nothing if it is."""
    ranges = {name: patch.supported for name, patch in registry.patches().items()}
    return {n: "" if release.covers(its, version) else f"for {its}" for n, its in ranges.items()}


def refusal(verdict: gate.Verdict) -> str:
    """Return why a patch would not be applied to the installed DeepSpeed; nothing if it would."""
    if verdict.is_fixed:
        return FIXED
    return "" if verdict.may_apply else f"{verdict.state.value}, {verdict.reason}"
