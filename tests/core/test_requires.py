"""A patch that requires another: who asks for one gets both, who leaves one out gets neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake

STATES = """
def states():
    return " ".join(s.state.value for n, s in ds_patches.status().items() if n in ("base", "upper"))
"""
APPLIED, LEFT_OUT = "applied applied\n", "needs base, which is left out: "


@pytest.fixture
def two(tmp_path: Path) -> fake.Place:
    """Two patches, of which `upper` requires `base`."""
    place = fake.Place(tmp_path, "base", "upper")
    place.edit("upper/binding.py", "targets=(", 'requires=("base",), targets=(')
    return place


@pytest.mark.parametrize(
    ("call", "told", "variables"),
    [
        ('apply("upper")', APPLIED, {}),
        ('apply_all(only="upper")', APPLIED, {}),
        ("apply_all()", APPLIED, {"DS_PATCHES": "upper"}),
        # the call has the last word
        ('apply_all(only="upper")', APPLIED, {"DS_PATCHES_SKIP": "base"}),
        ('apply_all(skip="base")', LEFT_OUT, {}),
        ("apply_all()", LEFT_OUT, {"DS_PATCHES_SKIP": "base"}),
    ],
)
def test_both_or_neither(two: fake.Place, call: str, told: str, variables: dict[str, str]) -> None:
    code = f"{STATES}print(ds_patches.{call}, states(), sep='\\n')"
    assert told in two.output(code, **variables)


def test_what_is_asked_for_by_name_is_not_left_out_in_silence(two: fake.Place) -> None:
    code = """
with pytest.raises(ds_patches.FlagError) as refused:
    ds_patches.apply_all()
print(refused.value)
with pytest.raises(ds_patches.FlagError, match="by name .the call's choice., and needs base"):
    ds_patches.apply_all(only="upper", skip="base")
"""
    told = f"upper is asked for by name (DS_PATCHES=upper), and {LEFT_OUT}"
    assert told in two.output(code, DS_PATCHES_SKIP="base", DS_PATCHES="upper")


def test_what_is_taken_back_with_what(two: fake.Place) -> None:
    code = f"""{STATES}
ds_patches.apply("base")
assert states() == "applied ready", "the required one alone"
ds_patches.apply("upper")
ds_patches.unapply("base")
assert states() == "reverted reverted", "the required one last"
for alone in (lambda: ds_patches.apply("upper"), lambda: ds_patches.apply_all(only="upper")):
    alone()
    assert states() == "applied applied"
    ds_patches.unapply("upper")
    assert states() == "reverted reverted", "it was applied for the other alone"
for call in (ds_patches.apply_all, lambda: [ds_patches.apply(n) for n in ("base", "upper")]):
    call()
    ds_patches.unapply("upper")
    assert states() == "applied reverted", "it was asked for, too"
    ds_patches.unapply_all()
"""
    two.output(code)


@pytest.mark.parametrize(
    ("file", "old", "new", "state"),
    [
        ("base/around.py", "def activate(", "def activate(*_): 1/0\ndef unused(", "failed"),
        ("base/binding.py", "<=0.19.8", "<=0.19.0", "out of range"),
    ],
)
def test_a_required_one_that_is_not_live_blocks(
    two: fake.Place, file: str, old: str, new: str, state: str
) -> None:
    two.edit(file, old, new)
    code = f"""
with pytest.raises(ds_patches.PatchNotApplied, match="upper is blocked: .*base, which is {state}"):
    ds_patches.apply("upper")
"""
    two.output(code)


def test_taken_back_before_the_import(two: fake.Place) -> None:
    """What only that one requires is not applied either."""
    code = f"""{STATES}
from ds_patches import startup
startup.arm()
ds_patches.unapply("upper")
import deepspeed.runtime.engine
print(states())
"""
    assert two.output(code, DS_PATCHES="upper") == "ready reverted\n"
