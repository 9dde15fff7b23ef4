"""One patch that fails keeps no other from being applied or taken back, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake

#: What every script here begins with.
BEGIN = """
import deepspeed.runtime.engine as engine
BOTH = ["first", "second"]
stock = dict(vars(engine.DeepSpeedEngine))
def states():
    return [ds_patches.status()[name].state.value for name in BOTH]
"""

#: The edit of the first with which it cannot be applied.
FAILING = ("around", "def activate(release, options):", "def activate(release, options):\n    1/0")


def script(tmp_path: Path, code: str, file: str = "around", old: str = "", new: str = "") -> str:
    """Run code where `first` and `second` are alike, but for an edit of the first; its output."""
    folder = fake.patch_folder(tmp_path / "patches", "first")
    fake.patch_folder(folder, "second")
    path = folder / f"first/{file}.py"
    fake.write(path, fake.edited(path.read_text(), old, new) if old else path.read_text())
    tree = fake.deepspeed(tmp_path / "deepspeed")
    return fake.output(fake.with_patches(folder) + BEGIN + code, tree)


def test_other_options_of_a_live_patch_are_said_last(tmp_path: Path) -> None:
    code = """
ds_patches.apply("first", mode="soft")
try:
    ds_patches.apply_all(only=BOTH, options={"first": {"mode": "hard"}})
except ds_patches.AlreadyApplied as error:
    assert "first is applied with mode=soft" in str(error)
else:
    raise SystemExit("silent")
print(states())
"""
    assert script(tmp_path, code) == "['applied', 'applied']\n"


def test_all_are_taken_back(tmp_path: Path) -> None:
    code = """
ds_patches.apply_all(only=BOTH)
try:
    ds_patches.unapply_all()
except ZeroDivisionError:
    pass
else:
    raise SystemExit("silent")
assert dict(vars(engine.DeepSpeedEngine)) == stock, "nor does the core leave anything"
print(states())
"""
    edit = ("around", "def deactivate():", "def deactivate():\n    1 / 0")
    assert script(tmp_path, code, *edit) == "['reverted', 'reverted']\n"


def test_a_refusal_of_all_leaves_nothing(tmp_path: Path) -> None:
    code = """
try:
    ds_patches.apply_all(only="first")
except ds_patches.PatchNotApplied:
    pass
assert dict(vars(engine.DeepSpeedEngine)) == stock
print(states()[0])
"""
    assert script(tmp_path, code, *FAILING) == "failed\n"


@pytest.mark.parametrize(("wanted", "content"), [('["first", "second"]', True), ('"first"', False)])
def test_too_old_for_one_patch_of_several_is_content(
    tmp_path: Path, wanted: str, content: bool
) -> None:
    """Strict mode is for what is wrong; too old for all that is wanted is nothing done."""
    code = f"""
try:
    ds_patches.apply_all(only={wanted}, strict=True)
    print("content")
except ds_patches.PatchNotApplied as refusal:
    print(refusal)
"""
    edit = ("binding", ">=0.16.0,<=0.19.8", ">=0.20.0,<=0.20.8")
    said = script(tmp_path, code, *edit)
    assert said.startswith("content" if content else "first is out of range")
