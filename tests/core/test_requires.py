"""A patch that requires another: who asks for one gets both, who leaves one out gets neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake

BEGIN = """
def states():
    return " ".join(s.state.value for n, s in ds_patches.status().items() if n in ("base", "upper"))
def said(**call):
    return " ".join(n for n, s in ds_patches.apply_all(**call).items() if s.live)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two patches, of which `upper` requires `base`."""
    folder = fake.patch_folder(tmp_path / "patches", "base")
    fake.patch_folder(folder, "upper")
    binding = folder / "upper/binding.py"
    text = fake.edited(
        binding.read_text(), "fixed_in=None,", 'fixed_in=None,\n    requires=("base",),'
    )
    fake.write(binding, text)
    return folder


def output(folder: Path, code: str, **variables: str) -> str:
    tree = fake.deepspeed(folder.parent / "deepspeed")
    return fake.output(fake.with_patches(folder) + BEGIN + code, tree, **variables).strip()


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ('only="upper"', {}),
        ("", {"DS_PATCHES": "upper"}),
        ('only="upper"', {"DS_PATCHES_BASE": "0"}),  # the call has the last word
    ],
)
def test_what_is_required_is_applied_too(
    folder: Path, call: str, variables: dict[str, str]
) -> None:
    assert output(folder, f"print(said({call}))", **variables) == "base upper"


def test_by_name(folder: Path) -> None:
    code = 'ds_patches.apply("upper"); print(states())'
    assert output(folder, code) == "applied applied"


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        ('skip="base"', {}),
        ("", {"DS_PATCHES_BASE": "0"}),
        ("", {"DS_PATCHES_SKIP": "base", "DS_PATCHES": "upper"}),
    ],
)
def test_without_what_is_left_out_by_name_neither_is(
    folder: Path, call: str, variables: dict[str, str]
) -> None:
    code = f"""
found = ds_patches.apply_all({call})
print(found["upper"].state.value, "|", found["upper"].reason)
"""
    said = output(folder, code, **variables)
    assert said.startswith("disabled | needs base, which is left out: ")


def test_the_required_one_alone(folder: Path) -> None:
    assert output(folder, 'ds_patches.apply("base"); print(states())') == "applied ready"


def test_the_required_one_is_taken_back_last(folder: Path) -> None:
    code = 'ds_patches.apply("upper"); ds_patches.unapply("base"); print(states())'
    assert output(folder, code) == "reverted reverted"


def test_what_was_applied_for_another_alone_is_taken_back_with_it(folder: Path) -> None:
    code = 'ds_patches.unapply("upper"); print(states())'
    for alone in ('ds_patches.apply("upper");', 'ds_patches.apply_all(only="upper");'):
        assert output(folder, alone + code) == "reverted reverted"
    for both in ("ds_patches.apply_all();", 'ds_patches.apply("base"); ds_patches.apply("upper");'):
        assert output(folder, both + code) == "applied reverted"


def test_a_required_one_that_fails_blocks(folder: Path) -> None:
    around = folder / "base/around.py"
    text = fake.edited(around.read_text(), "def activate(", "def activate(*_): 1/0\ndef unused(")
    fake.write(around, text)
    code = """
try:
    ds_patches.apply("upper")
except ds_patches.PatchNotApplied as refusal:
    print(refusal)
"""
    expected = "upper is blocked: needs base is failed: ZeroDivisionError"
    assert output(folder, code).startswith(
        expected.replace("needs base is", "needs base, which is")
    )


def test_a_required_one_that_may_not_be_applied_blocks(folder: Path) -> None:
    binding = folder / "base/binding.py"
    fake.write(binding, fake.edited(binding.read_text(), "<=0.19.8", "<=0.19.0"))
    said = output(folder, "print(states())")
    assert said == "unknown version blocked"
    reason = output(folder, 'print(ds_patches.status()["upper"].reason)')
    assert reason.startswith("needs base, which is unknown version: ")


@pytest.mark.parametrize(
    ("required", "reason"), [("bass", "bass, no such patch"), ("upper", "itself")]
)
def test_what_cannot_be_required(folder: Path, required: str, reason: str) -> None:
    binding = folder / "upper/binding.py"
    fake.write(binding, fake.edited(binding.read_text(), '("base",)', f'("{required}",)'))
    said = output(folder, 'print(ds_patches.status()["upper"])')
    assert said == f"upper is broken: ds_patches.upper requires {reason}"


def test_those_that_require_each_other(folder: Path) -> None:
    binding = folder / "base/binding.py"
    fake.write(
        binding, fake.edited(binding.read_text(), "fixed_in", 'requires=("upper",),\n    fixed_in')
    )
    said = output(folder, 'print(states(), ds_patches.status()["upper"].reason)')
    assert said == ("broken blocked needs base, which is broken: ds_patches.base requires itself")
