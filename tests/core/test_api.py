"""The public surface: what is reported, what is warned of, what is raised, and how light it is."""

import pytest

import ds_patches
from tests.core import fake


def test_importing_is_light() -> None:
    code = """
        import sys
        import ds_patches
        heavy = {"torch", "deepspeed", "wrapt", "asyncio"}
        assert not sys.modules.keys() & {*heavy, "packaging"}
        names = ds_patches.names()
        assert not sys.modules.keys() & heavy, "imported by a binding"
        assert set(ds_patches.__all__) == set(dir(ds_patches))
        for name in ds_patches.__all__:
            getattr(ds_patches, name)
        print(*names)
    """
    assert fake.run(code).stdout.split() == list(ds_patches.names())
    with pytest.raises(AttributeError, match="aply"):
        ds_patches.aply  # noqa: B018


def test_apply_all_reports_and_apply_raises(place: fake.Place) -> None:
    fake.deepspeed(place.deepspeed, "0.19.9")
    code = """
        status = ds_patches.apply_all(only="sample")["sample"]
        seen = (status.state.value, status.installed, status.live)
        assert seen == ("refused", "0.19.9", False)
        with pytest.raises(ds_patches.PatchNotApplied, match="DS_PATCHES_FORCE=sample"):
            ds_patches.apply("sample")
        assert ds_patches.apply_all(only="sample", force="sample")["sample"].live
        assert "ds_patches.diagnostics.defects" not in sys.modules, "to apply takes no table"
        ds_patches.unapply("sample")
        status = ds_patches.apply("sample", force=True)
        assert str(status) == "sample is applied: 3 of 3 wrappers in place"
        assert status.live and {status, ds_patches.status()["sample"]} == {status}
        for call in (ds_patches.apply, ds_patches.unapply, ds_patches.is_applied,
                     lambda name: ds_patches.apply_all(skip=name)):
            with pytest.raises(ds_patches.UnknownPatch, match="sample"):
                call("smaple")
    """
    assert place.run(code).stderr.count("sample is not applied, refused") == 1


@pytest.mark.parametrize(("rank", "lines"), [("RANK", 1), ("SLURM_PROCID", 1), ("", 2)])
def test_a_release_that_is_not_known_is_one_warning_for_a_job(
    two: fake.Place, rank: str, lines: int
) -> None:
    fake.deepspeed(two.deepspeed, "0.19.9")
    stderr = ""
    for number in "01":
        ranks = {rank: number} if rank else {}
        stderr += two.run("ds_patches.apply_all(only='lower,upper')", **ranks).stderr
    assert stderr.count("lower, upper are not applied, refused: DeepSpeed 0.19.9") == lines
    assert stderr.count("DS_PATCHES_FORCE=lower,upper applies it\n") == stderr.count("\n") == lines


def test_to_import_auto_is_to_apply(place: fake.Place) -> None:
    """A patch that is not wanted is no failure, and no warning; a call beats the environment."""
    fake.write(place.deepspeed / "deepspeed/__init__.py", "")  # applying imports the targets
    code = """
        import ds_patches.auto
        assert fake.states("sample") == ["disabled"]
        ds_patches.apply_all(strict=True)
        assert ds_patches.apply("sample").live
    """
    assert "not applied" not in place.run(code, DS_PATCHES="none").stderr


CURE = '''
"""The engine's forward is marked."""

from ds_patches.core import api
from ds_patches.core.patch import Class, Patch

PATCH = Patch(
    name="cure",
    summary="Marks a forward",
    supported=">=0.16.0,<=0.19.8",
    targets=(Class("deepspeed.runtime.engine", "Engine").target("forward", "mark"),),
)

apply, unapply, is_applied = api.of(__name__)


def mark(wrapped, engine, args, kwargs):
    return ("marked", wrapped(*args, **kwargs))
'''


def test_a_cure_is_one_file_and_has_functions_of_its_own(place: fake.Place) -> None:
    fake.write(place.patches / "cures/cure.py", CURE)
    fake.write(place.patches / "other.py", "raise RuntimeError('which is no cure')")
    code = """
        from ds_patches import cure
        assert "cure" in ds_patches.names()
        assert not cure.is_applied()
        status = cure.apply()
        assert status.live and status == ds_patches.status()["cure"]
        assert cure.is_applied() and fake.depth("Engine.forward")
        assert not fake.depth("scale")
        assert cure.unapply().state.value == "ready"
        assert not fake.depth("Engine.forward")
    """
    place.run(code)
