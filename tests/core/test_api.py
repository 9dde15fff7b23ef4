"""The public surface: what is reported, what is warned of, what is raised, and how light it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ds_patches
from tests.core import fake


def test_importing_is_light() -> None:
    code = """
        import sys
        import ds_patches
        heavy = {"torch", "deepspeed", "wrapt", "asyncio", "packaging"} & set(sys.modules)
        assert not heavy, heavy
        names = ds_patches.names()
        heavy = {"torch", "deepspeed", "wrapt", "asyncio"} & set(sys.modules)
        assert not heavy, f"a binding imports {heavy}"
        assert set(ds_patches.__all__) == set(dir(ds_patches))
        for name in ds_patches.__all__:
            getattr(ds_patches, name)
        print(*names)
    """
    assert fake.output(code).split() == list(ds_patches.names())


def test_an_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="aply"):
        ds_patches.aply  # noqa: B018


def test_not_installed_is_reported_and_raises_in_strict_mode_only(tmp_path: Path) -> None:
    code = """
        import sys
        import ds_patches
        result = ds_patches.apply_all()
        assert set(result) == set(ds_patches.names())
        assert {s.state for s in result.values()} == {ds_patches.State.NOT_INSTALLED}
        assert not {"torch", "deepspeed"} & set(sys.modules)
        try:
            ds_patches.apply_all(strict=True)
        except ds_patches.PatchNotApplied as refusal:
            print(*(s.name for s in refusal.statuses))
    """
    done = fake.run(code, fake.dependencies(tmp_path / "lib"), bare=True)
    assert done.stdout.split() == list(ds_patches.names()), done.stderr
    for name in ds_patches.names():
        warnings = re.findall(f"{name} is not applied, not installed", done.stderr)
        assert len(warnings) == 2, "one for each of the two calls"


def test_apply_all_reports_and_apply_raises(place: fake.Place) -> None:
    fake.deepspeed(place.deepspeed, "0.19.9")
    code = """
        status = ds_patches.apply_all(only="sample")["sample"]
        seen = (status.state.value, status.installed, status.live)
        assert seen == ("unknown version", "0.19.9", False)
        with pytest.raises(ds_patches.PatchNotApplied, match="DS_PATCHES_FORCE=sample"):
            ds_patches.apply("sample")
        assert "deepspeed" not in sys.modules, "a refused patch touches nothing"
        assert ds_patches.apply_all(only="sample", force="all")["sample"].live
        ds_patches.unapply("sample")
        assert ds_patches.apply("sample", force=True).live
        for call in (ds_patches.apply, ds_patches.unapply, ds_patches.is_applied,
                     lambda name: ds_patches.apply_all(skip=name)):
            with pytest.raises(ds_patches.UnknownPatch, match="the patches are: .*sample"):
                call("smaple")
    """
    done = place.run(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sample is not applied, unknown version") == 1


def test_each_call_sees_what_is_installed_now(place: fake.Place) -> None:
    other = fake.deepspeed(place.root / "other", "0.19.7")
    code = f"""
        from tests.core import fake
        told = lambda: ds_patches.status()["sample"].installed
        assert told() == "0.19.8"
        sys.path.insert(0, {str(other)!r})
        assert told() == "0.19.7"
        fake.deepspeed(fake.Path({str(other)!r}), "0.19.6")
        assert told() == "0.19.6"
        assert ds_patches.apply_all(only="sample")["sample"].installed == "0.19.6"
    """
    place.output(code)


def test_options_reach_activate_in_one_spelling_and_cannot_change_under_way(
    place: fake.Place,
) -> None:
    place.edit("sample/binding.py", '"soft", (', '("soft",), (')
    code = """
        ds_patches.apply("sample", mode="hard,soft")
        from ds_patches.sample import around
        assert around.log == [("activate", "0.19.8", {"mode": "soft,hard"})]
        ds_patches.apply("sample")
        for mode in ("soft,hard", "hard+soft", "all", ["hard", "soft"]):
            ds_patches.apply("sample", mode=mode)
            ds_patches.apply_all(options={"sample": {"mode": mode}}, only="sample")
        told = "with mode=soft,hard; unapply it before applying it with mode=hard"
        with pytest.raises(ds_patches.AlreadyApplied, match=told):
            ds_patches.apply("sample", mode="hard")
        with pytest.raises(ds_patches.AlreadyApplied, match=told):
            ds_patches.apply_all(options={"sample": {"mode": "hard"}}, only="sample")
        assert ds_patches.status()["sample"].options == {"mode": "soft,hard"}
        ds_patches.unapply("sample")
        assert ds_patches.status()["sample"].options == {"mode": "soft"}
        ds_patches.unapply("sample")
        assert around.log[1:] == [("deactivate",)]
        ds_patches.apply("sample", mode="hard")
        assert around.log[-1][2] == {"mode": "hard"}
    """
    place.output(code)


def test_statuses_print_as_a_line_each_and_can_be_in_a_set(place: fake.Place) -> None:
    code = """
        result = ds_patches.apply_all(only="sample")
        lines = str(result).splitlines()
        assert [line.split()[0] for line in lines] == list(ds_patches.names()), lines
        (line,) = (line for line in lines if line.startswith("sample"))
        assert line.split(maxsplit=2) == ["sample", "applied", "4 of 4 wrappers in place"]
        assert str(result["sample"]) == "sample is applied: 4 of 4 wrappers in place"
        assert repr(result) == repr(dict(result)) and isinstance(result, dict)
        assert {result["sample"], ds_patches.status()["sample"]} == {result["sample"]}
        ds_patches.unapply_all()
        told = str(ds_patches.status()["sample"])
        assert told == "sample is reverted: unapplied, no wrapper is left"
    """
    place.output(code)


def test_a_status_is_one_line_whatever_went_wrong(place: fake.Place) -> None:
    raising = 'raise RuntimeError("first\\nsecond")  # '
    place.edit("sample/around.py", 'log.append(("activate", ', raising)
    code = """
        with pytest.raises(ds_patches.PatchNotApplied, match="second") as failure:
            ds_patches.apply_all(only="sample")
        (status,) = failure.value.statuses
        assert str(status) == "sample is failed: RuntimeError: first", str(status)
        assert len(str(ds_patches.status()).splitlines()) == len(ds_patches.names())
    """
    place.output(code)


@pytest.mark.parametrize(("wanted", "state"), [("sample", "applied"), ("none", "disabled")])
def test_to_import_auto_is_to_apply(place: fake.Place, wanted: str, state: str) -> None:
    code = 'import ds_patches.auto; print(ds_patches.status()["sample"].state.value)'
    assert place.output(code, DS_PATCHES=wanted) == f"{state}\n"


def test_disabled_is_a_state_and_no_warning(place: fake.Place) -> None:
    code = """
        status = ds_patches.apply_all(strict=True)["sample"]
        assert (status.state.value, status.reason) == ("disabled", "DS_PATCHES=none")
        assert ds_patches.status()["sample"].state.value == "disabled"
        assert ds_patches.apply("sample").live, "an explicit call beats the environment"
    """
    done = place.run(code, DS_PATCHES="none")
    assert done.returncode == 0, done.stderr
    assert "not applied" not in done.stderr
