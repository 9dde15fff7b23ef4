"""A patch that requires another: who asks for one gets both, who leaves one out gets neither."""

from typing import Any

import pytest

from tests.core import fake

APPLIED, LEFT_OUT = ["applied", "applied"], "needs lower, which is left out: "


@pytest.fixture
def both(two: fake.Place) -> fake.Place:
    """`upper` requires `lower`."""
    two.edit("upper/binding.py", "targets=(", 'requires=("lower",), targets=(')
    return two


@pytest.mark.parametrize(
    ("call", "expected", "variables"),
    [
        ('apply("upper")', APPLIED, {}),
        ('apply_all(only="upper")', APPLIED, {}),
        ("apply_all()", APPLIED, {"": "upper"}),
        # the call has the last word
        ('apply_all(only="upper")', APPLIED, {"_SKIP": "lower"}),
        ('apply_all(skip="lower")', LEFT_OUT, {}),
        ("apply_all()", LEFT_OUT, {"_SKIP": "lower"}),
        # what is asked for by name is not left out in silence
        ('apply_all(only="upper", skip="lower")', "name .the call's choice. and needs lower", {}),
        (
            "apply_all()",
            f"^upper is asked for by name .DS_PATCHES=upper. and {LEFT_OUT}",
            {"": "upper", "_SKIP": "lower"},
        ),
    ],
)
def test_both_or_neither(
    both: fake.Place, call: str, expected: Any, variables: dict[str, str]
) -> None:
    """Expected: the states, what is said of the patch, or the error."""
    if expected is APPLIED:
        code = f"ds_patches.{call}; assert fake.states('lower', 'upper') == {APPLIED}"
    elif expected is LEFT_OUT:
        code = f"assert {LEFT_OUT!r} in ds_patches.{call}['upper'].reason"
    else:
        code = f"with pytest.raises(ds_patches.FlagError, match={expected!r}): ds_patches.{call}"
    both.run(code, **{f"DS_PATCHES{suffix}": value for suffix, value in variables.items()})


def test_what_is_taken_back_with_what(both: fake.Place) -> None:
    """The required patch is taken back last; both wrap the same functions."""
    code = """
for call, name, states in (
    ("apply", "lower", "applied ready"),
    ("apply", "upper", "applied applied"),
    ("unapply", "lower", "ready ready"),
    ("apply", "upper", "applied applied"),
    ("unapply", "upper", "applied ready"),
):
    getattr(ds_patches, call)(name)
    assert fake.states("lower", "upper") == states.split(), (call, name)
    assert fake.depth() == states.count("applied"), (call, name)
"""
    both.run(code)


@pytest.mark.parametrize(
    ("file", "old", "new", "state"),
    [
        ("lower/around.py", "def activate(", "def activate(*_): 1/0\ndef unused(", "failed"),
        ("lower/binding.py", "<=0.19.8", "<=0.19.0", "out of range"),
    ],
)
def test_a_required_patch_that_is_not_live_blocks(
    both: fake.Place, file: str, old: str, new: str, state: str
) -> None:
    both.edit(file, old, new)
    code = f"""
with pytest.raises(ds_patches.PatchNotApplied, match="needs lower, which is {state}"):
    ds_patches.apply("upper")
"""
    both.run(code)
