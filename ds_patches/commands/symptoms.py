"""The ordinary scripts that DeepSpeed gets wrong: all as a table, or those of one release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import gate, registry, release
from ds_patches.symptoms import SYMPTOMS, Symptom

_TITLES = ("what you run", "what happens", "ZeRO", "wrong from", "right from", "cure")
_LINE = (
    "add `import ds_patches.auto` above deepspeed.initialize, or start it by "
    "`DS_PATCHES=all ds-patches run -- ...`"
)


def markdown(page: str = "", patches: str = "", only: str = "") -> str:
    """Return the table of all releases.

    page: where the anchors are, if the first column is to link there. patches: the page of each
    patch, with {} for its name. only: the rows of this patch, without the column that names it.
    """
    rows: list[tuple[str, ...]] = [_TITLES, ("---",) * len(_TITLES)]
    rows += [_row(one, page, patches) for one in SYMPTOMS if only in ("", one.patch)]
    if only:
        rows = [row[:-1] for row in rows]
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def is_wrong(one: Symptom, version: Version) -> bool:
    """Whether this release gets it wrong."""
    return version >= Version(one.first) and (one.right is None or version < Version(one.right))


@dataclass(frozen=True)
class Cure:
    """What helps in one release. by: "patch", "setting", "upgrade", or nothing."""

    by: str
    said: str
    do: str


def cure(one: Symptom, version: Version, answers: Mapping[str, str]) -> Cure:
    """Return what helps where a release is wrong.

    answers: for each patch, why it would not be applied; nothing if it would.
    """
    why = answers.get(one.patch, "not installed") if one.patch else ""
    ends = [end for end in (one.right, _floor(one)) if end and Version(end) > version]
    better = min(ends, key=Version, default="")
    upgrade = f"upgrade DeepSpeed to {better} or later" if better else ""
    if better and better != one.right:
        upgrade += f", and apply {one.patch}"  # which is for no older one
    if one.patch and not why:
        also = f", and {one.add}" if one.add else ""
        return Cure("patch", f"cured by {one.patch}", f"{_LINE}{also}")
    said = f"not cured: {one.patch} is {why}" if why else "no patch cures it"
    if one.add and not one.patch:
        return Cure("setting", said, " or ".join(filter(None, (one.add, upgrade))))
    if upgrade:
        return Cure("upgrade", said, upgrade)
    return Cure("", said, "no release or setting that helps is known")


def of_releases(version: Version) -> dict[str, str]:
    """Return for each patch why a release is not one of its; nothing if it is."""
    patches = registry.patches().values()
    return {
        patch.name: "" if release.covers(patch.supported, version) else f"for {patch.supported}"
        for patch in patches
    }


def here() -> dict[str, str]:
    """Return for each patch why it would not be applied to the installed DeepSpeed."""
    verdicts = {name: gate.check(patch) for name, patch in registry.patches().items()}
    return {
        name: "" if v.may_apply else f"{v.state.value}: {v.reason}" for name, v in verdicts.items()
    }


def _row(one: Symptom, page: str, patches: str) -> tuple[str, ...]:
    script = f"[{one.script}]({page}#{one.anchor})" if page else one.script
    patch = f"[{one.patch}]({patches.format(one.patch)})" if patches else one.patch
    cure = " and ".join(filter(None, (patch * bool(one.patch), one.add)))
    cure += f", on {floor} and later" if (floor := _floor(one)) else ""
    stages = ", ".join(map(str, one.stages))
    return script, one.outcome, stages, one.first, one.right or "none", cure


def _floor(one: Symptom) -> str:
    """From when on the patch is for the releases that are wrong, if not from the first."""
    if not (patch := registry.patches().get(one.patch)):
        return ""
    supported = SpecifierSet(patch.supported)
    floor = next((spec.version for spec in supported if spec.operator == ">="), one.first)
    return floor if Version(floor) > Version(one.first) else ""


def plain(markdown: str) -> str:
    """Return a text without marks and links, on one line."""
    return " ".join(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "").split())
