"""The table of symptoms: it has the whole ledger, every patch, and the releases that are known."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ds_patches.commands import symptoms
from ds_patches.core import registry
from ds_patches.symptoms import SYMPTOMS, TESTED, Symptom
from tests.accumulation.ledger import LEDGER, NOW, Entry
from tests.core import fake
from tests.releases import record

README = (fake.REPOSITORY / "README.md").read_text(encoding="utf-8")
RELEASES = record.load().releases
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


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.name)
def test_the_table_has_the_ledger(entry: Entry) -> None:
    first, right = ends(entry)
    rows = rows_of(entry)
    assert rows
    assert any(
        Version(one.first) <= Version(first)
        and (one.right is None or (right is not None and Version(one.right) >= Version(right)))
        for one in rows
    )


def test_a_row_claims_no_more_than_the_ledger() -> None:
    of_ledger = {start for starts in ROWS.values() for start in starts}
    for one in SYMPTOMS:
        if one.script.startswith(tuple(of_ledger)):
            found = {ends(entry) for entry in LEDGER if one in rows_of(entry)}
            assert (one.first, one.right) in found, one.script


def test_every_patch_has_a_row() -> None:
    assert {one.patch for one in SYMPTOMS} == {*registry.patches(), ""}
    assert all(one.add for one in SYMPTOMS if not one.patch)


def test_the_releases_are_known_ones() -> None:
    assert RELEASES[-1] == TESTED, "look at what the new release gets wrong"
    named = {version for one in SYMPTOMS for version in (one.first, one.right) if version}
    assert named <= set(RELEASES)


def test_a_row_is_of_the_releases_that_it_names() -> None:
    found = {v: {one.script for one in symptoms.of_release(Version(v))} for v in RELEASES}
    plain = "gradient accumulation"
    assert [v for v in RELEASES if plain in found[v]] == ["0.17.6", "0.18.0", "0.18.1", "0.18.2"]
    assert "two backwards over one forward" in found[TESTED]


def test_doctor_says_what_comes_of_it() -> None:
    answers = dict.fromkeys(registry.patches(), "") | {"coalesce": "disabled (by me)"}
    said = symptoms.lines(Version("0.18.3"), answers)
    assert said[0] == "ordinary scripts that DeepSpeed 0.18.3 gets wrong"
    assert "  accumulation cures, once applied:" in said
    assert "  coalesce would cure these, but is disabled (by me):" in said
    assert len([line for line in said if line.endswith("; here the patch only warns")]) == 1
    assert "  no patch, a setting:" in said
    assert "  no patch, a setting:" not in symptoms.lines(Version("0.17.6"), answers)
    newer = symptoms.lines(Version("99.0"), answers)
    assert newer[0].startswith(f"ordinary scripts that DeepSpeed {TESTED}, the newest")


def test_the_readme_opens_with_the_table() -> None:
    table = README.partition("<!-- symptoms:begin -->\n")[2].partition("\n<!-- symptoms:end -->")[0]
    assert table == symptoms.markdown(patches="ds_patches/{}/__init__.py"), (
        "the rows of python -m ds_patches table, with links to the patches' folders"
    )


def test_the_readme_is_short() -> None:
    """Besides the table."""
    before, _, rest = README.partition("<!-- symptoms:begin -->")
    assert len((before + rest.partition("<!-- symptoms:end -->")[2]).split()) < 400
