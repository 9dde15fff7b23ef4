"""Two patches on the same functions, failures half way, names imported before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake

SETUP = """
import itertools, sys
import deepspeed.runtime.engine as engine
owners = [(engine, "scale"), *((engine.Engine, n) for n in ("forward", "norm", "extra"))]
def raws():
    return [vars(owner).get(name) for owner, name in owners]
def depth():
    text = repr([engine.scale(1), engine.Engine().forward(1), engine.Pipeline().norm(1)])
    return text.count("marked") / 3
originals = raws()
"""


def two_patches(tmp_path: Path) -> str:
    folder = fake.patch_folder(tmp_path / "patches", "lower")
    fake.patch_folder(folder, "upper")
    return fake.with_patches(folder) + SETUP


def test_two_patches_on_one_function_come_off_in_any_order(tmp_path: Path) -> None:
    installation = fake.deepspeed(tmp_path / "deepspeed")
    code = two_patches(tmp_path) + (
        """
both = ["lower", "upper"]
for on, off in itertools.product(itertools.permutations(both), repeat=2):
    for name in on:
        ds_patches.apply(name)
    assert depth() == 2
    assert {ds_patches.status()[n].state.value for n in both} == {"applied"}
    ds_patches.unapply(off[0])
    assert depth() == 1, (on, off)
    assert ds_patches.status()[off[0]].state.value == "reverted"
    assert ds_patches.status()[off[1]].state.value == "applied"
    ds_patches.unapply(off[1])
    assert depth() == 0
    assert all(now is before for now, before in zip(raws(), originals)), (on, off)
print("done")
"""
    )
    assert fake.output(code, installation) == "done\n"


#: What goes wrong in the sample's `around.py`, and what the error then says.
BREAKAGES = {
    "wrapper is gone": ("def add(", "def renamed(", "has no attribute 'add'"),
    "activate raises": (
        "def activate(release, options):",
        "def activate(release, options):\n    1 / 0",
        "division",
    ),
    "module is broken": (
        "log = []",
        "log = []\nraise RuntimeError('broken module')",
        "broken module",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_failure_takes_everything_back(tmp_path: Path, breakage: str) -> None:
    old, new, message = BREAKAGES[breakage]
    folder = fake.patch_folder(tmp_path / "patches")
    fake.patch_folder(folder, "whole")
    around = folder / "sample/around.py"
    fake.write(around, fake.edited(around.read_text(), old, new))
    code = (
        fake.with_patches(folder)
        + SETUP
        + (
            f"""
try:
    ds_patches.apply("sample")
except ds_patches.PatchNotApplied as refusal:
    assert {message!r} in str(refusal), refusal
    assert {message!r} in str(refusal.__cause__)
    assert refusal.statuses[0].state.value == "failed"
else:
    raise SystemExit("applied")
assert all(now is before for now, before in zip(raws(), originals))
assert ds_patches.status()["sample"].state.value == "failed"
assert not ds_patches.is_applied("sample")
around = sys.modules.get("ds_patches.sample.around")
if {breakage!r} == "activate raises":
    assert around.log == [("deactivate",)], around.log

try:
    ds_patches.apply_all(only=["sample", "whole"])
except ds_patches.PatchNotApplied as refusal:
    assert [s.name for s in refusal.statuses] == ["sample"]
else:
    raise SystemExit("silent")
assert ds_patches.is_applied("whole"), "one failure stops no other patch"
ds_patches.unapply_all()
assert all(now is before for now, before in zip(raws(), originals))
print("done")
"""
        )
    )
    assert fake.output(code, fake.deepspeed(tmp_path / "deepspeed")) == "done\n"


def test_names_imported_before_are_told(tmp_path: Path) -> None:
    installation = fake.deepspeed(tmp_path / "deepspeed")
    fake.write(installation / "early.py", "from deepspeed.runtime.engine import scale as mine")
    folder = fake.patch_folder(tmp_path / "patches")
    code = fake.with_patches(folder) + (
        """
import early
status = ds_patches.apply("sample")
assert "early.mine was imported before and still calls the original" in status.notes, status
assert "engines built before keep their hooks" in status.notes
assert ds_patches.status()["sample"].notes == status.notes
print("done")
"""
    )
    done = fake.run(code, installation)
    assert done.stdout == "done\n", done.stderr
    assert "sample: early.mine was imported before" in done.stderr


def test_a_module_imported_anew_is_no_longer_patched(tmp_path: Path) -> None:
    folder = fake.patch_folder(tmp_path / "patches")
    code = fake.with_patches(folder) + (
        """
import sys
ds_patches.apply("sample")
for name in [n for n in sys.modules if n.startswith("deepspeed")]:
    del sys.modules[name]
assert not ds_patches.is_applied("sample")
import deepspeed
assert not ds_patches.is_applied("sample")
assert ds_patches.status()["sample"].state.value == "shadowed"
ds_patches.unapply("sample")
assert ds_patches.apply("sample").state.value == "applied"
print("done")
"""
    )
    assert fake.output(code, fake.deepspeed(tmp_path / "deepspeed")) == "done\n"


@pytest.mark.parametrize("carrier", ["property", "classmethod", "staticmethod"])
def test_only_functions_are_wrapped(tmp_path: Path, carrier: str) -> None:
    """Where Dynamo traces a call of another, it would call the original, without a word."""
    engine = fake.edited(fake.ENGINE, "def norm(", f"@{carrier}\n    def norm(")
    folder = fake.patch_folder(tmp_path / "patches", shapes_of=engine)
    code = (
        fake.with_patches(folder)
        + SETUP
        + (
            f"""
try:
    ds_patches.apply("sample")
except ds_patches.PatchNotApplied as refusal:
    assert "Engine.norm is a {carrier}; only functions of a module and meth" in str(refusal)
else:
    raise SystemExit("applied")
assert all(now is before for now, before in zip(raws(), originals))
print("done")
"""
        )
    )
    installation = fake.deepspeed(tmp_path / "deepspeed", engine=engine)
    assert fake.output(code, installation) == "done\n"
