"""The table of defects: its rows are sound, and it has every patch and every fix."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.diagnostics import configuration, doctor, findings, training
from ds_patches.diagnostics.defects import (
    DEFECTS,
    DOCUMENTED,
    FIXES,
    HARMS,
    SCRIPT_ACTIONS,
    SETTINGS,
    TABLE,
    TESTED,
    Defect,
    wrong_in,
)
from ds_patches.diagnostics.proofs import PROOFS
from tests.core import fake
from tools.releases import RELEASES

FILE = fake.REPOSITORY / "ds_patches" / "diagnostics" / "defects.json"
#: Upstream's history from v0.16.0 to August 2026: each commit, its pull request, and what it is.
#: Of the classes `fix` alone is ours; `unreleased` mends what no release had.
COMMITS = [
    line.split()
    for line in Path(__file__).with_name("deepspeed_commits.txt").read_text("utf-8").splitlines()
]
NUMBERS = Counter(number for defect in DEFECTS if defect.right for number in defect.numbers.split())
#: Of a configuration, besides the table's settings.
OTHERS = {"filled", "single", "unclipped", "zero3"}
README = (fake.REPOSITORY / "README.md").read_text(encoding="utf-8")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would take the last of two equal keys."""
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_the_data_is_as_the_class_says() -> None:
    data = json.loads(FILE.read_text("utf-8"), object_pairs_hook=unique)
    order = [field.name for field in fields(Defect)]
    for row in data.pop("defects"):
        assert [*row] == sorted(row, key=order.index), row
        messages = row.pop("messages", ["..."])
        assert messages, row
        assert all(isinstance(text, str) and text.strip() for text in messages), row
        empty = [name for name, text in row.items() if not isinstance(text, str) or not text]
        assert empty == ["stages"] * ("first" not in row), row
    for names in data.values():
        assert [*names] == sorted(names)
    for lines in data["keys"].values():
        assert (keys := " ".join(lines).split()) == sorted(keys)


def title(defect: Defect) -> str:
    return f"{defect.first} {defect.outcome[:40]}"


@pytest.mark.parametrize("defect", TABLE, ids=title)
def test_a_row_is_sound(defect: Defect) -> None:
    assert [*defect.stages] == sorted({*defect.stages} & {0, 1, 2, 3})
    assert {*defect.needs.split()} <= {*SETTINGS, *SCRIPT_ACTIONS, *OTHERS}
    assert all(number.isdigit() for number in defect.numbers.split())
    assert defect.harm in HARMS
    assert not defect.proof or defect.proof in PROOFS
    assert bool(defect.proof or defect.unproved) == bool(defect.section and defect.patch), (
        "why not?"
    )
    assert not (defect.proof and defect.unproved)
    assert defect.patch or defect.do or defect.right, "what helps?"
    assert all(re.compile(path.lstrip("?!")) for path in defect.shown.split("|"))
    if defect.stages:
        wrong = [version for version in RELEASES if defect.is_wrong(Version(version))]
        after = RELEASES[RELEASES.index(wrong[-1]) + 1 :]
        assert (defect.first, defect.right) == (wrong[0], after[0] if after else "")
        supported = registry.patches()[defect.patch].supported if defect.patch else ""
        assert [*SpecifierSet(supported).filter(wrong)]
    else:
        assert (defect.right, defect.patch, defect.needs in ("", "zero3")) == ("", "", True)


def test_each_kind_of_row_has_its_place() -> None:
    notes = tuple(defect for defect in TABLE if not defect.stages)
    assert (*DOCUMENTED, *notes, *FIXES) == TABLE
    assert len({*TABLE}) == len(TABLE)
    assert [*FIXES] == sorted(FIXES, key=lambda defect: Version(defect.right))
    assert RELEASES[-1] == TESTED, "look at what the new release gets wrong"


@pytest.mark.parametrize("name", [n for n, patch in registry.patches().items() if patch.by_default])
def test_a_patch_is_for_the_releases_of_its_rows(name: str) -> None:
    """Or for those of them that it can work on, which are the newest."""
    own = [defect for defect in DEFECTS if defect.patch == name]
    assert any(defect.section for defect in own)
    wrong = [v for v in RELEASES if any(defect.is_wrong(Version(v)) for defect in own)]
    supported = [*SpecifierSet(registry.patches()[name].supported).filter(RELEASES)]
    assert wrong[-len(supported) :] == supported


def test_every_fix_of_upstream_is_in_the_table() -> None:
    assert {number for number, rows in NUMBERS.items() if rows > 1} == {"7636", "7665"}
    listed = {number for _, number, what in COMMITS if what == "fix"} - {"-"}
    others = {number for _, number, _ in COMMITS} - listed
    assert listed <= {*NUMBERS}
    assert not {*NUMBERS} & others
    since = {d.right for d in DEFECTS if d.right and {*d.numbers.split()} - listed}
    assert since <= {"0.19.6", "0.19.7", "0.19.8"}


@pytest.mark.parametrize("defect", DEFECTS, ids=title)
def test_what_helps_is_no_release_that_is_wrong(defect: Defect) -> None:
    """Nor the one that is there."""
    for release in filter(defect.is_wrong, map(Version, RELEASES)):
        for why in ("", "switched off"):
            helps = findings.cure(defect, release, {defect.patch: why})
            words = re.findall(r"upgrade DeepSpeed to (\S+) or later(, and apply)?", helps.do)
            assert (helps.kind == "patch") == (bool(defect.patch) and not why)
            for better, by_patch in words:
                assert Version(better) > release
                assert by_patch or not defect.is_wrong(Version(better))


def test_settings_rule_out_or_decide() -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "Muon"},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": 12,
    }
    facts = configuration.settings(config)
    on = {name for name, on in facts.items() if on is True}
    assert on == {"accumulation", "muon", "no_overflow_check", "no_pin_memory"}
    assert [name for name, on in facts.items() if on == "script"] == ["bf16_or_fp16", "fp16"]
    facts = {**facts, "stage": 2}
    known = configuration.Configuration(facts, {})
    depends = {defect.numbers: known.conditions(defect) for defect in DEFECTS}
    assert depends["8441 8442"] is depends["8443 8600"] is None, "of other stages"
    assert depends["8432 8435"] == ("script",), "it is left open"
    assert configuration.settings(config | {"fp16": {"enabled": True}})["bf16_or_fp16"]


def test_the_symptoms_of_the_readme_are_answered() -> None:
    table = README.partition("|what you see|where|")[2].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 7
    for row in table:
        see, release_text, _, _, patch = row.strip("|").split("|")
        release = Version((re.findall(r"\d+\.\d+\.\d+", release_text) or [TESTED])[0])
        (anchor,) = re.findall(r"\(docs/troubleshooting.md#(.+)\)", see)
        rows = [d for d in wrong_in(release, patch) if d.section == anchor]
        assert rows, see
        message = re.match(r"\[`(.+?)`\]", see)
        case = training.read([message[1]]) if message else training.Training(is_configured=True)
        diagnosed = {f.defect for f in doctor.diagnose(case, release).findings}
        assert diagnosed & {*rows}, see
