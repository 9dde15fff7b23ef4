"""The public surface: what is reported, what is warned of, what is raised, and how light it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ds_patches
from tests.core import fake


@pytest.fixture
def sample(tmp_path: Path) -> tuple[str, Path]:
    """Return the line that adds the sample patch, and a fake DeepSpeed."""
    folder = fake.patch_folder(tmp_path / "patches")
    return fake.with_patches(folder), fake.deepspeed(tmp_path / "deepspeed")


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
    libraries = fake.dependencies(tmp_path / "lib")
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
            assert {s.name for s in refusal.statuses} == set(result)
        else:
            raise SystemExit("silent")
        print("done")
    """
    done = fake.run(code, libraries, bare=True)
    assert done.stdout == "done\n", done.stderr
    for name in ds_patches.names():
        warnings = re.findall(f"{name} is not applied, not installed", done.stderr)
        assert len(warnings) == 2, "one for each of the two calls"


def test_apply_all_reports_and_apply_raises(sample: tuple[str, Path], tmp_path: Path) -> None:
    add, _ = sample
    newer = fake.deepspeed(tmp_path / "newer", "0.19.9")
    code = add + (
        """
import sys
status = ds_patches.apply_all(only="sample")["sample"]
assert (status.state.value, status.installed, status.live) == ("unknown version", "0.19.9", False)
try:
    ds_patches.apply("sample")
except ds_patches.PatchNotApplied as refusal:
    assert "DS_PATCHES_FORCE=sample" in str(refusal)
else:
    raise SystemExit("silent")
assert "deepspeed" not in sys.modules, "a refused patch touches nothing"
assert ds_patches.apply_all(only="sample", force="all")["sample"].live
ds_patches.unapply("sample")
assert ds_patches.apply("sample", force=True).live
for wrong in (lambda: ds_patches.apply("smaple"), lambda: ds_patches.unapply("smaple"),
              lambda: ds_patches.is_applied("smaple"), lambda: ds_patches.apply_all(skip="smaple")):
    try:
        wrong()
    except ds_patches.UnknownPatch as error:
        assert "sample" in str(error).split("the patches are:")[1]
    else:
        raise SystemExit("silent")
print("done")
"""
    )
    done = fake.run(code, newer)
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("sample is not applied, unknown version") == 1


def test_each_call_sees_what_is_installed_now(sample: tuple[str, Path], tmp_path: Path) -> None:
    add, installed = sample
    other = fake.deepspeed(tmp_path / "other", "0.19.7")
    code = add + (
        f"""
import shutil, sys
told = lambda: ds_patches.status()["sample"].installed
assert told() == "0.19.8"
sys.path.insert(0, {str(other)!r})
assert told() == "0.19.7"
shutil.move("{other}/deepspeed-0.19.7.dist-info", "{other}/deepspeed-0.19.6.dist-info")
with open("{other}/deepspeed-0.19.6.dist-info/METADATA", "w") as metadata:
    metadata.write("Name: deepspeed\\nVersion: 0.19.6\\n")
assert told() == "0.19.6"
assert ds_patches.apply_all(only="sample")["sample"].installed == "0.19.6"
print("done")
"""
    )
    assert fake.output(code, installed) == "done\n"


def test_several_choices_reach_activate_in_one_spelling(
    tmp_path: Path, sample: tuple[str, Path]
) -> None:
    binding = tmp_path / "patches/sample/binding.py"
    taken = fake.edited(binding.read_text(), '"soft", (', '("soft",), (')
    fake.write(binding, taken)
    code = sample[0] + (
        """
ds_patches.apply("sample", mode="hard,soft")
from ds_patches.sample import around
assert around.log == [("activate", "0.19.8", {"mode": "soft,hard"})]
for mode in ("soft,hard", "hard+soft", "all", ["hard", "soft"]):
    ds_patches.apply("sample", mode=mode)
    ds_patches.apply_all(options={"sample": {"mode": mode}}, only="sample")
try:
    ds_patches.apply("sample", mode="hard")
except ds_patches.AlreadyApplied as error:
    assert "with mode=soft,hard; unapply it before applying it with mode=hard" in str(error)
else:
    raise SystemExit("silent")
print("done")
"""
    )
    assert fake.output(code, sample[1]) == "done\n"


def test_options_reach_activate_and_cannot_change_under_way(sample: tuple[str, Path]) -> None:
    code = sample[0] + (
        """
ds_patches.apply("sample", mode="hard")
from ds_patches.sample import around
assert around.log == [("activate", "0.19.8", {"mode": "hard"})]
ds_patches.apply("sample")
ds_patches.apply("sample", mode="hard")
for again in (lambda: ds_patches.apply("sample", mode="soft"),
              lambda: ds_patches.apply_all(options={"sample": {"mode": "soft"}}, only="sample")):
    try:
        again()
    except ds_patches.AlreadyApplied as error:
        assert "unapply it" in str(error)
    else:
        raise SystemExit("silent")
assert ds_patches.status()["sample"].options == {"mode": "hard"}
ds_patches.unapply("sample")
assert ds_patches.status()["sample"].options == {"mode": "soft"}
ds_patches.unapply("sample")
assert around.log[1:] == [("deactivate",)]
ds_patches.apply("sample", mode="soft")
assert around.log[-1][2] == {"mode": "soft"}
print("done")
"""
    )
    assert fake.output(code, sample[1]) == "done\n"


def test_statuses_print_as_a_line_each_and_can_be_in_a_set(sample: tuple[str, Path]) -> None:
    code = sample[0] + (
        """
result = ds_patches.apply_all(only="sample")
lines = str(result).splitlines()
assert [line.split()[0] for line in lines] == list(ds_patches.names()), lines
(line,) = (line for line in lines if line.startswith("sample"))
assert line.split(maxsplit=2) == ["sample", "applied", "4 of 4 wrappers in place"]
assert str(result["sample"]) == "sample is applied: 4 of 4 wrappers in place"
assert repr(result) == repr(dict(result)) and isinstance(result, dict)
assert {result["sample"], ds_patches.status()["sample"]} == {result["sample"]}
for again in (ds_patches.status(), ds_patches.unapply_all()):
    assert len(str(again).splitlines()) == len(ds_patches.names())
assert str(ds_patches.status()["sample"]) == "sample is reverted: unapplied, no wrapper is left"
print("done")
"""
    )
    assert fake.output(code, sample[1]) == "done\n"


def test_a_status_is_one_line_whatever_went_wrong(tmp_path: Path) -> None:
    folder = fake.patch_folder(tmp_path / "patches")
    around = folder / "sample/around.py"
    raising = 'raise RuntimeError("first\\nsecond")  # '
    around.write_text(fake.edited(around.read_text(), 'log.append(("activate", ', raising))
    code = fake.with_patches(folder) + (
        """
try:
    ds_patches.apply_all(only="sample")
except ds_patches.PatchNotApplied as failure:
    assert "second" in str(failure)
    (status,) = failure.statuses
assert str(status) == "sample is failed: RuntimeError: first", str(status)
assert len(str(ds_patches.status()).splitlines()) == len(ds_patches.names())
print("done")
"""
    )
    assert fake.output(code, fake.deepspeed(tmp_path / "deepspeed")) == "done\n"


def test_disabled_is_a_state_and_no_warning(sample: tuple[str, Path]) -> None:
    code = sample[0] + (
        """
status = ds_patches.apply_all(strict=True)["sample"]
assert (status.state.value, status.reason) == ("disabled", "DS_PATCHES=none")
assert ds_patches.status()["sample"].state.value == "disabled"
assert ds_patches.apply("sample").live, "an explicit call beats the environment"
print("done")
"""
    )
    done = fake.run(code, sample[1], DS_PATCHES="none")
    assert done.stdout == "done\n", done.stderr
    assert "not applied" not in done.stderr
