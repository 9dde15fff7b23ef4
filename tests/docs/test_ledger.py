"""The ledger: every fix is in it, every line is sound, and releases are as it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches import ledger
from ds_patches.core import registry
from tests.releases import RELEASES, place

FIXES = [ledger.Fix(**line) for line in ledger.read()["fixes"]]
NUMBERS = Counter(number for one in FIXES for number in one.numbers.split())
#: Upstream's history from v0.16.0 to August 2026: each commit, its pull request, and what it is.
#: Of the classes `fix` alone is ours; `unreleased` mends what no release had.
COMMITS = [
    line.split()
    for line in (Path(__file__).parent / "deepspeed_commits.txt").read_text("utf-8").splitlines()
]
#: By the number of a fix or what it says: a file of the package, and a text that stands in it as
#: long as it is wrong, or after "+" since it is right.
SAMPLES = r"""
7171 | runtime/zero/stage_1_and_2.py | inf_or_nan.logical_not() * total_norm
7349 | runtime/checkpoint_engine/decoupled_checkpoint_engine.py | mp.set_start_method('spawn', force
7418 | runtime/zero/stage3.py | + bucket.elements = 0
7639 | ops/csrc/adam/multi_tensor_apply.cuh | int sizes[depth_to_max_tensors
7707 | runtime/zero/partition_parameters.py | self._partition_param_sec(param)\n
7788 | runtime/constants.py | DDP_BFLOAT16 = "bf16"
7969 | runtime/lr_schedules.py | return [0.0]
8009 | runtime/zero/parameter_offload.py | + def ensure_zero_ordered_dict
8142 | runtime/lr_schedules.py | + cosine_progress
8179 | runtime/lr_schedules.py | + stair_position
`deepspeed.comm.isend` | comm/comm.py | + return cdb.isend
`safe_get_full_fp32_param` | utils/tensor_fragment.py | lp._hp_mapping.hp_fragment = hp_fragment
measures experts' weights | runtime/fp16/fused_optimizer.py | ['name']].append(self.fp32_
counts as 1 | runtime/utils.py | + combine_grad_norm_groups
momentum of all matrices but | runtime/zero/stage_1_and_2.py | + staged_momentum = None
integer and boolean | utils/zero_to_fp32.py | v.float() for k, v in state_dict["module"]
"""


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


@pytest.mark.parametrize("sample", SAMPLES.strip().splitlines())
def test_releases_are_as_it_says(sample: str) -> None:
    which, file, text = sample.replace("\\n", "\n").split(" | ")
    (one,) = (one for one in FIXES if which in one.numbers.split() or which in one.seen)
    first, right = RELEASES.index(one.first), RELEASES.index(one.right)
    files = {at: place(name) / "deepspeed" / file for at, name in enumerate(RELEASES)}
    there = {at: file.read_text("utf-8") for at, file in files.items() if file.is_file()}
    if not {right - 1, right} <= {*there}:
        pytest.skip(f"DeepSpeed {one.right} and the one before it are not in {place('')}")
    for at, found in there.items():
        if text.startswith("+ "):
            assert (text[2:] in found) is (at >= right), RELEASES[at]
        else:
            assert (text in found) is (first <= at < right), RELEASES[at]
