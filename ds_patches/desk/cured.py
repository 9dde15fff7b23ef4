"""What helps against a defect in one release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import gate, registry, release
from ds_patches.desk.defects import TESTED, Defect

_APPLY = (
    "add `import ds_patches.auto` above deepspeed.initialize, or start it as before with "
    "`ds-patches run --` in front: `ds-patches run -- torchrun train.py`"
)


@dataclass(frozen=True)
class Cure:
    """What helps in one release. by: "patch", "setting", "upgrade" or "nothing"."""

    by: str
    said: str
    do: str


#: Why a patch would not be applied: a build has the fix of a later release.
FIXED = "not needed: what it cures is fixed here"


def cure(one: Defect, version: Version, answers: Mapping[str, str]) -> Cure:
    """Return what helps where a release is wrong.

    answers: for each patch, why it would not be applied; nothing if it would.
    """
    why = answers.get(one.patch, "not installed") if one.patch else ""
    if why == FIXED:
        return Cure("nothing", "the DeepSpeed here has the fix", "nothing is to be done")
    if one.patch and not why:
        also = f", and {one.do}" if one.do else ""
        return Cure("patch", f"{one.patch} would cure this", f"{_APPLY}{also}")
    ends = [end for end in (one.right, floor(one)) if end and Version(end) > version]
    better = min(ends, key=Version, default="")
    upgrade = f"upgrade DeepSpeed to {better} or later" if better else ""
    if better and better != one.right:
        upgrade += f", and apply {one.patch}"  # which is for no older one
    said = f"not cured: {one.patch} is {why}" if why else "no patch cures it"
    if one.do and not one.patch:
        return Cure("setting", said, " or ".join(filter(None, (one.do, upgrade))))
    if upgrade:
        return Cure("upgrade", said, upgrade)
    if why and version > Version(TESTED):
        return Cure("nothing", said, f"DeepSpeed {TESTED} with {one.patch} is right")
    return Cure("nothing", said, "no release or setting that helps is known")


def floor(one: Defect) -> str:
    """From when on the patch is for the releases that are wrong, if not from the first."""
    if not (patch := registry.patches().get(one.patch)):
        return ""
    supported = SpecifierSet(patch.supported)
    found = next((spec.version for spec in supported if spec.operator == ">="), one.first)
    return found if Version(found) > Version(one.first) else ""


def of_releases(version: Version) -> dict[str, str]:
    """Return for each patch why a release is not one of its; nothing if it is."""
    ranges = {name: patch.supported for name, patch in registry.patches().items()}
    return {n: "" if release.covers(its, version) else f"for {its}" for n, its in ranges.items()}


def here() -> dict[str, str]:
    """Return for each patch why it would not be applied to the installed DeepSpeed."""
    return {name: refusal(gate.check(patch)) for name, patch in registry.patches().items()}


def refusal(verdict: gate.Verdict) -> str:
    if verdict.is_fixed:
        return FIXED
    return "" if verdict.may_apply else f"{verdict.state.value}, {verdict.reason}"
