"""A patch that requires another: who asks for one gets both, who leaves one out gets neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake

STATES = """
def states():
    return " ".join(s.state.value for n, s in ds_patches.status().items() if n in ("base", "upper"))
"""


@pytest.fixture
def two(tmp_path: Path) -> fake.Place:
    """Two patches, of which `upper` requires `base`."""
    place = fake.Place(tmp_path, "base", "upper")
    place.edit("upper/binding.py", "fixed_in=None,", 'fixed_in=None, requires=("base",),')
    return place


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ('apply("upper")', {}),
        ('apply_all(only="upper")', {}),
        ("apply_all()", {"DS_PATCHES": "upper"}),
        ('apply_all(only="upper")', {"DS_PATCHES_BASE": "0"}),  # the call has the last word
    ],
)
def test_what_is_required_is_applied_too(
    two: fake.Place, call: str, variables: dict[str, str]
) -> None:
    said = two.output(f"{STATES}ds_patches.{call}; print(states())", **variables)
    assert said == "applied applied\n"


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ('skip="base"', {}),
        ("", {"DS_PATCHES_BASE": "0"}),
        ("", {"DS_PATCHES_SKIP": "base", "DS_PATCHES": "upper"}),
    ],
)
def test_without_what_is_left_out_by_name_neither_is(
    two: fake.Place, call: str, variables: dict[str, str]
) -> None:
    said = two.output(f'print(ds_patches.apply_all({call})["upper"])', **variables)
    assert said.startswith("upper is disabled: needs base, which is left out: ")


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


def test_a_required_one_that_fails_blocks(two: fake.Place) -> None:
    two.edit("base/around.py", "def activate(", "def activate(*_): 1/0\ndef unused(")
    told = "upper is blocked: needs base, which is failed: ZeroDivisionError"
    code = f"""
with pytest.raises(ds_patches.PatchNotApplied, match={told!r}):
    ds_patches.apply("upper")
"""
    two.output(code)


def test_a_required_one_that_may_not_be_applied_blocks(two: fake.Place) -> None:
    two.edit("base/binding.py", "<=0.19.8", "<=0.19.0")
    code = f'{STATES}print(states(), ds_patches.status()["upper"].reason)'
    told = "unknown version blocked needs base, which is unknown version: "
    assert two.output(code).startswith(told)
