"""The ordinary scripts that DeepSpeed gets wrong: all as a table, or those of one release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import columns, registry
from ds_patches.symptoms import SYMPTOMS, TESTED, Symptom

_TITLES = ("what you run", "what happens", "ZeRO", "wrong from", "right from", "cure")


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


def of_release(version: Version) -> Iterator[Symptom]:
    """Yield what this release gets wrong."""
    for one in SYMPTOMS:
        if version >= Version(one.first) and (one.right is None or version < Version(one.right)):
            yield one


def lines(version: Version, answers: Mapping[str, str]) -> list[str]:
    """Say what this release gets wrong, and which patch cures it.

    answers: for each patch, why it would not be applied; nothing if it would.
    """
    wrong = list(of_release(version))
    newest = min(version, Version(TESTED))
    told = f"DeepSpeed {newest}" + ", the newest that was tested," * (newest < version)
    said = [f"ordinary scripts that {told} gets wrong"]
    for patch in dict.fromkeys(one.patch for one in wrong):
        mine = [_cells(one, version) for one in wrong if one.patch == patch]
        said += [
            f"  {_heading(patch, answers)}",
            *(f"    {line}" for line in columns.aligned(mine)),
        ]
    return said


def _row(one: Symptom, page: str, patches: str) -> tuple[str, ...]:
    script = f"[{one.script}]({page}#{one.anchor})" if page else one.script
    patch = f"[{one.patch}]({patches.format(one.patch)})" if patches else one.patch
    cure = " and ".join(filter(None, (patch * bool(one.patch), one.add))) + _offered(one)
    stages = ", ".join(map(str, one.stages))
    return script, one.outcome, stages, one.first, one.right or "none", cure


def _offered(one: Symptom) -> str:
    """From when on the patch is for the releases that are wrong, if not from the first."""
    if not one.patch:
        return ""
    supported = SpecifierSet(registry.patches()[one.patch].supported)
    floor = next((spec.version for spec in supported if spec.operator == ">="), one.first)
    return f", on {floor} and later" if Version(floor) > Version(one.first) else ""


def _heading(patch: str, answers: Mapping[str, str]) -> str:
    if not patch:
        return "no patch, a setting:"
    why = answers.get(patch, "not installed")
    return f"{patch} would cure these, but is {why}:" if why else f"{patch} cures, once applied:"


def _cells(one: Symptom, version: Version) -> tuple[str, ...]:
    text = f"{one.script}: {one.outcome}".replace("`", "")
    if one.add:
        text += f"; add {one.add}".replace("`", "")
    return f"ZeRO {', '.join(map(str, one.stages))}", text
