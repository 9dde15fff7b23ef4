"""Failures half way, names imported before, modules that are imported again."""

import pytest

from tests.core import fake

SETUP = """
import deepspeed.runtime.engine as engine
from tests.core.fake import depth, states
owners = [(engine, "scale"), *((engine.Engine, n) for n in ("forward", "norm"))]
def depths():
    return {depth(name) for name in ("scale", "Engine.forward", "Engine.norm")}
def raws():
    return [vars(owner).get(name) for owner, name in owners]
originals, stock = raws(), dict(vars(engine.DeepSpeedEngine))
def nothing_is_left():
    assert all(now is before for now, before in zip(raws(), originals))
    assert dict(vars(engine.DeepSpeedEngine)) == stock, "nor does the core leave anything"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def mark(", "def renamed(", "has no attribute 'mark'"),
        ("def activate():\n", "def activate():\n    1 / 0\n", "division"),
        ("log = []", "log = []\nraise ValueError('no module')", "no module"),
    ],
)
def test_a_failure_takes_everything_back(two: fake.Place, old: str, new: str, message: str) -> None:
    """And stops no other patch."""
    two.edit("lower/around.py", old, new)
    code = f"""
with pytest.raises(ds_patches.PatchNotApplied, match={message!r}) as refusal:
    ds_patches.apply("lower")
assert {message!r} in str(refusal.value.__cause__)
assert refusal.value.statuses[0].state.value == "failed"
nothing_is_left()
assert states("lower") == ["failed"]
assert not ds_patches.is_applied("lower")
around = sys.modules.get("ds_patches.lower.around")
assert {message!r} != "division" or around.log == ["deactivate"], around.log
for names in (["lower", "upper"], ["lower"]):
    with pytest.raises(ds_patches.PatchNotApplied) as refusal:
        ds_patches.apply_all(only=names)
    assert [s.name for s in refusal.value.statuses] == ["lower"]
    assert ds_patches.is_applied("upper") is ("upper" in names)
    ds_patches.unapply_all()
    nothing_is_left()
"""
    two.run(SETUP + code)


def test_all_are_taken_back_though_one_raises(two: fake.Place) -> None:
    two.edit("lower/around.py", "def deactivate():", "def deactivate():\n    1 / 0")
    code = """
ds_patches.apply_all(only=["lower", "upper"])
with pytest.raises(ZeroDivisionError):
    ds_patches.unapply_all()
nothing_is_left()
assert states("lower", "upper") == ["ready", "ready"]
"""
    two.run(SETUP + code)


def test_too_old_for_one_patch_of_several_is_content(two: fake.Place) -> None:
    """Strict mode is for what is wrong; too old for all that is wanted is nothing done."""
    two.edit("lower/binding.py", ">=0.16.0,<=0.19.8", ">=0.20.0,<=0.20.8")
    code = """
ds_patches.apply_all(only=["lower", "upper"], strict=True)
with pytest.raises(ds_patches.PatchNotApplied, match="^lower is out of range"):
    ds_patches.apply_all(only="lower", strict=True)
"""
    two.run(code)


def test_names_imported_before_are_told(place: fake.Place) -> None:
    fake.write(place.deepspeed / "early.py", "from deepspeed.runtime.engine import scale as mine")
    code = """
import early
status = ds_patches.apply("sample")
assert "early.mine was imported before and still calls the original" in status.notes, status
assert "engines built before keep their hooks" in status.notes
assert ds_patches.status()["sample"].notes == status.notes
"""
    assert "sample: early.mine was imported before" in place.run(code).stderr


def test_a_module_that_was_imported_anew_is_patched_anew(place: fake.Place) -> None:
    """Also classes of before are in use; unapplied, none of them has anything of ours."""
    code = """
from importlib import reload
from ds_patches.core import lifecycle
ds_patches.apply("sample")
for _ in range(2):
    before, function = engine.Engine, engine.scale
    reload(engine)
    status = ds_patches.status()["sample"]
    assert status.state.value == "failed" and not status.live
    assert "Engine.forward is gone: its module was imported again" in status.reason
    assert "engine:scale is replaced by deepspeed.runtime.engine (" in status.reason
    assert "ds_patches" not in status.reason
    assert not depth("Engine.forward") and before().forward(1)[0] == "marked"
    assert ds_patches.apply_all(only="sample")["sample"].live
    assert lifecycle.lifecycles["sample"].journal.is_in_place
    assert depths() == {1} and before().forward(1)[0] == "marked" == function(1)[0]
assert sys.modules["ds_patches.sample.around"].log == ["activate"]
ds_patches.apply("sample")
assert depths() == {1}
ds_patches.unapply("sample")
assert depths() == {0} and before().forward(1)[0] == "forward"
assert function(1)[0] == "scale"
for kind in (before, engine.Engine, engine.DeepSpeedEngine):
    assert not [value for value in vars(kind).values() if "ds_patches" in str(type(value))]
"""
    place.run(SETUP + code)
