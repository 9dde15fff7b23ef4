"""The table of symptoms: it has the whole ledger, every patch, and the releases that are known."""

from __future__ import annotations

import re

import pytest
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.desk import cured, explain, pasted
from ds_patches.desk.row import Symptom
from ds_patches.desk.symptoms import CURED, SETTINGS, SYMPTOMS, TESTED
from tests.accumulation.test_ledger import LEDGER, NOW, Entry
from tests.core import fake
from tests.releases import RELEASES

README = (fake.REPOSITORY / "README.md").read_text(encoding="utf-8")
#: The rows of each entry of the ledger, by how their first cell begins.
ROWS = {
    "A1": ("a second backward", "two forwards", "a parameter that a step does not use"),
    "A2": ("three micro steps",),
    "A3": ("a second backward", "three micro steps"),
    "A4": ("gradient accumulation",),
    "A5": ("a parameter that a step does not use",),
    "A6": ("`engine(x)` and",),
    "A7": ("`scale_wrt_gas=False`",),
    "A8": ("bf16 with fp32 sums",),
    "A9": ("bf16 with fp32 sums, optimizer on the CPU",),
    "A10": ("`overlap_comm`, and a parameter",),
    "A11": ("CPU ranks",),
}


def rows_of(entry: Entry) -> list[Symptom]:
    """The rows about an entry, offloaded or not as it is."""
    offloaded = "offload" in str(entry.more)
    return [
        one
        for one in SYMPTOMS
        if one.script.startswith(ROWS[entry.id]) and entry.stage in one.stages
        if offloaded or not one.script.endswith("optimizer on the CPU")
    ]


def ends(entry: Entry) -> tuple[str, str | None]:
    """The first release that is wrong, and the first that is right again."""
    if entry.last == NOW:
        return entry.first, None
    return entry.first, RELEASES[RELEASES.index(entry.last) + 1]


def spans_of(entry: Entry) -> set[tuple[str, str | None]]:
    """Of these rows, what is wrong from when to when; one that another goes on with is one span."""
    spans = {(one.first, one.right) for one in rows_of(entry)}
    for first, right in [*spans]:
        for begin, end in [*spans]:
            if right == begin:
                spans = spans - {(first, right), (begin, end)} | {(first, end)}
    return spans


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.name)
def test_the_table_has_the_ledger(entry: Entry) -> None:
    first, right = ends(entry)
    assert any(
        Version(begin) <= Version(first)
        and (end is None or (right is not None and Version(end) >= Version(right)))
        for begin, end in spans_of(entry)
    )


def test_a_row_claims_no_more_than_the_ledger() -> None:
    of_ledger = {start for starts in ROWS.values() for start in starts}
    for one in SYMPTOMS:
        if one.script.startswith(tuple(of_ledger)):
            about = [entry for entry in LEDGER if one in rows_of(entry)]
            assert {end for entry in about for end in spans_of(entry) if end == ends(entry)}, one


def test_every_patch_has_a_row() -> None:
    assert {one.patch for one in CURED} == {*registry.patches()}
    assert all(one.add and not one.patch for one in SETTINGS)


def test_the_releases_are_known_ones() -> None:
    assert RELEASES[-1] == TESTED, "look at what the new release gets wrong"
    named = {version for one in SYMPTOMS for version in (one.first, one.right) if version}
    assert named <= set(RELEASES)


def test_a_row_is_of_the_releases_that_it_names() -> None:
    (one,) = (one for one in SYMPTOMS if one.script == "gradient accumulation")
    wrong = [version for version in RELEASES if one.is_wrong(Version(version))]
    assert wrong == ["0.17.6", "0.18.0", "0.18.1", "0.18.2"]


def test_the_symptoms_of_the_readme_are_answered() -> None:
    table = README.partition("|what you see|where|")[2].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for row in table:
        see, where, _, _, patch = row.strip("|").split("|")
        message, anchor = re.findall(r"\[`?(.+?)`?\]\(docs/troubleshooting.md#(.+)\)", see)[0]
        release = Version((re.findall(r"\d+\.\d+\.\d+", where) or [TESTED])[0])
        found = explain.answers(pasted.read(message), release, cured.of_releases(release))
        said = {one.one.anchor for one in found if one.here.endswith(f"{patch} would cure this")}
        assert anchor in said, see
