"""The ledger: every fix is in it, and every line is sound."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.desk import configuration, ledger
from ds_patches.desk.symptoms import SYMPTOMS
from tests.releases import RELEASES

FIXES = [one for one in (*SYMPTOMS, *ledger.fixes()) if one.right]
NUMBERS = Counter(number for one in FIXES for number in one.numbers.split())
#: Upstream's history from v0.16.0 to August 2026: each commit, its pull request, and what it is.
#: Of the classes `fix` alone is ours; `unreleased` mends what no release had.
COMMITS = [
    line.split()
    for line in (Path(__file__).parent / "deepspeed_commits.txt").read_text("utf-8").splitlines()
]


def test_every_fix_is_in_the_ledger() -> None:
    assert {number for number, lines in NUMBERS.items() if lines > 1} == {"7636", "7665"}
    assert len({*FIXES}) == len(FIXES)
    listed = {number for _, number, what in COMMITS if what == "fix"} - {"-"}
    others = {number for _, number, _ in COMMITS} - listed
    assert listed <= {*NUMBERS}
    assert not {*NUMBERS} & others
    since = {one.right for one in FIXES if {*one.numbers.split()} - listed}
    assert since <= {"0.19.6", "0.19.7", "0.19.8"}


def test_lines_are_sound() -> None:
    for one in ledger.fixes():
        wrong = [release for release in RELEASES if one.is_wrong(Version(release))]
        assert wrong[0] == one.first, one
        assert one.right in RELEASES, one
        assert {*one.needs.split()} <= {*ledger.read()["settings"], *ledger.read()["doings"]}, one
        if one.patch:
            assert [*SpecifierSet(registry.patches()[one.patch].supported).filter(wrong)], one


def test_settings_rule_out_or_decide() -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "Muon"},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": 12,
    }
    facts = ledger.settings(config)
    on = {name for name, on in facts.items() if on}
    assert on == {"accumulation", "muon", "no_overflow_check", "no_pin_memory"}
    assert [name for name, on in facts.items() if on is None] == ["bf16_or_fp16", "fp16"]
    facts = {"stage": 2} | {name: name if on is None else on for name, on in facts.items()}
    depends = {one.numbers: configuration.conditions(one, facts) for one in FIXES}
    assert depends["8441 8442"] is depends["8443 8600"] is None, "of other stages"
    assert depends["8432 8435"] == ("fp16",), "it is left open"
    assert ledger.settings(config | {"fp16": {"enabled": True}})["bf16_or_fp16"]
