"""A finding: a defect that a training has, its evidence, and its cure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.diagnostics.defects import HARMS, TESTED, Defect, plain

#: The command that applies the patches to a training.
APPLY = "ds-patches run -- torchrun train.py"
#: In `Finding.depends`: the defect depends on the script, not on a setting.
SCRIPT = "script"
#: The reason to refuse a patch if the installed code has the fix of a later release.
FIXED = "not needed: the installed code has the fix"


@dataclass(frozen=True)
class Cure:
    """The cure in a release. kind: "patch", "applied", "setting", "upgrade" or "nothing"."""

    kind: str
    why: str
    do: str


@dataclass(frozen=True)
class Finding:
    """A defect of a training.

    evidence: the settings that cause it, or the line of a log.
    depends: the undecided settings on which it depends, and SCRIPT.
    is_sure: False if the message in the log may be that of another defect.
    """

    defect: Defect
    cure: Cure
    evidence: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    is_logged: bool = False
    is_sure: bool = True

    @property
    def is_open(self) -> bool:
        """True if it also depends on the script."""
        return SCRIPT in self.depends

    @property
    def counts(self) -> bool:
        """True if it makes the exit status 1: wrong weights or a crash, without a live patch."""
        harmful = self.defect.harm != "cost" and bool(self.defect.stages)
        return harmful and self.cure.kind != "applied" and not self.is_open

    @property
    def rank(self) -> tuple[bool, bool, int, bool]:
        """Sort key: findings of a log first, then those that settings decide; worst first."""
        harm = [*HARMS].index(self.defect.harm) if self.defect.stages else len(HARMS)
        return not self.is_logged, self.is_open, harm, bool(self.depends)

    def as_json(self) -> dict[str, Any]:
        defect, cure = self.defect, self.cure
        names = ("harm", "stages", "first", "patch", "proof")
        return {
            "script": plain(defect.script),
            "outcome": plain(defect.outcome),
            **{name: getattr(defect, name) for name in names},
            "right": defect.right or None,
            "section": defect.anchor,
            "evidence": self.evidence,
            "depends": self.depends,
            "sure": self.is_sure,
            "cure": cure.kind,
            "why": cure.why,
            "do": plain(cure.do),
        }


def cure(
    defect: Defect, version: Version | None, refusals: Mapping[str, str], *, is_live: bool = False
) -> Cure:
    """Return the cure of a defect in a release; version: None if it is not known.

    refusals: by patch, the reason why it would not be applied; "" if it would.
    is_live: the start-up hook applies patches in this environment.
    """
    patch, do = defect.patch, defect.do
    refusal = refusals.get(patch, "not installed") if patch else ""
    if not defect.stages:
        return Cure("setting", "no defect of DeepSpeed", do)
    if patch and not refusal and is_live:
        return Cure("applied", f"{patch} fixes this, and is applied", do)
    if patch and not refusal:
        return Cure(
            "patch", f"{patch} fixes this; not applied", f"{APPLY}; and {do}".removesuffix("; and ")
        )
    cured_from = [first for first in (defect.right, floor(defect)) if first]
    newer = [first for first in cured_from if not version or Version(first) > version]
    better = min(newer, key=Version, default="")
    upgrade = f"upgrade DeepSpeed to {better} or later" if better else ""
    if better and better != defect.right:
        upgrade += f", and apply {defect.patch}"  # it does not support older releases
    why = f"{defect.patch} is {refusal}" if refusal else "no patch fixes this"
    if defect.do and not defect.patch:
        return Cure("setting", why, " or ".join(filter(None, (defect.do, upgrade))))
    if upgrade:
        return Cure("upgrade", why, upgrade)
    if refusal and version and version > Version(TESTED):
        return Cure("nothing", why, f"DeepSpeed {TESTED} with {defect.patch} is right")
    return Cure("nothing", why, "not known: no release or setting that helps")


def floor(defect: Defect) -> str:
    """Return the first release that the patch supports, if older ones have the defect; else ""."""
    if not (patch := registry.patches().get(defect.patch)):
        return ""
    supported = SpecifierSet(patch.supported)
    first = next((spec.version for spec in supported if spec.operator == ">="), defect.first)
    return first if Version(first) > Version(defect.first) else ""
