"""The ledger: every fix is in it, and every line is sound."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.desk import ledger
from tests.releases import RELEASES

FIXES = [ledger.Fix(**line) for line in ledger.read()["fixes"]]
NUMBERS = Counter(number for one in FIXES for number in one.numbers.split())
#: Upstream's history from v0.16.0 to August 2026: each commit, its pull request, and what it is.
#: Of the classes `fix` alone is ours; `unreleased` mends what no release had.
COMMITS = [
    line.split()
    for line in (Path(__file__).parent / "deepspeed_commits.txt").read_text("utf-8").splitlines()
]


def test_every_fix_is_in_the_ledger() -> None:
    assert {number for number, lines in NUMBERS.items() if lines > 1} == {"7665", "8224", "8245"}
    assert len({(one.numbers, one.seen) for one in FIXES}) == len(FIXES)
    listed = {number for _, number, what in COMMITS if what == "fix"} - {"-"}
    others = {number for _, number, _ in COMMITS} - listed
    assert listed <= {*NUMBERS}
    assert not {*NUMBERS} & others
    since = {one.right for one in FIXES if {*one.numbers.split()} - listed}
    assert since <= {"0.19.6", "0.19.7", "0.19.8"}


def test_lines_are_sound() -> None:
    for one in FIXES:
        wrong = RELEASES[RELEASES.index(one.first) : RELEASES.index(one.right)]
        assert wrong, one
        assert one.stages in ("0123", "012", "123", "01", "03", "12", "23", *"0123"), one
        assert {*one.needs.split()} <= {*ledger.read()["settings"], *ledger.read()["doings"]}, one
        if one.by:
            assert [*SpecifierSet(registry.patches()[one.by].supported).filter(wrong)], one


def test_a_release_lacks_what_later_ones_fixed() -> None:
    seen = {one.seen for one in ledger.concerning(Version("0.18.4"), {})}
    assert seen == {
        one.seen
        for one in FIXES
        if RELEASES.index(one.first) <= RELEASES.index("0.18.4") < RELEASES.index(one.right)
    }
    assert not ledger.concerning(Version(RELEASES[-1]))


def test_settings_rule_out_or_decide() -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "Muon"},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": 12,
    }
    facts = ledger.settings(config)
    assert [name for name, on in facts.items() if on] == ["accumulation", "muon"]
    assert [name for name, on in facts.items() if on is None] == ["fp16", "half"]
    lacking = ledger.concerning(Version("0.19.6"), {"stage": 2} | facts)
    numbers = {one.numbers for one in lacking}
    assert not {"8441 8442", "8443 8600"} & numbers  # of other stages
    assert "8432 8435" in numbers  # fp16 is left open
    assert ledger.settings(config | {"fp16": {"enabled": True}})["half"]
