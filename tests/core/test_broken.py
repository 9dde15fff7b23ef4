"""A patch that cannot be used, or a DeepSpeed, is a state with a reason: all else goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.core import fake
from tests.core.test_declared import distribution

#: What is wrong with the folder of a patch, by file, old and new; and a part of the reason.
FOLDERS = {
    "no shapes": ("shapes.json", None, "", "FileNotFoundError"),
    "no json": ("shapes.json", "", "{", "JSONDecodeError"),
    "no object": ("shapes.json", "", "[]", "shapes.json or releases: AttributeError"),
    "no spans": ("shapes.json", "0.16.0-0.19.8", "all", "InvalidVersion"),
    "nothing recorded": ("shapes.json", "", "{}", "nothing is of >=0.16.0,<=0.19.8"),
    "no specifier": ("binding.py", ">=0.16.0,<=0.19.8", ">>0.16", "InvalidSpecifier"),
    "no binding": ("binding.py", None, "", "No module named 'our_patches.sample.binding'"),
    "zero division": ("binding.py", "", "1 / 0", "ZeroDivisionError: division by zero"),
    "name error": ("binding.py", "", "PATCH = Patch()", "NameError: name 'Patch' is not"),
    "syntax": ("binding.py", "", "PATCH = = 1", "SyntaxError: invalid syntax (binding.py, line 1)"),
    "exit": ("binding.py", "", "raise SystemExit(3)", "SystemExit: 3"),
    "package": ("__init__.py", '"""A sample."""', "import nothing", "No module named 'nothing'"),
    "no patch": ("binding.py", "", "PATCH = None", "binding has no PATCH"),
    "another name": ("binding.py", 'name="sample"', 'name="x"', "PATCH is named 'x', its folder"),
    "no such patch": ("binding.py", "fixed_in", "requires=('no',), fixed_in", "requires no: no"),
    "itself": ("binding.py", "fixed_in", "requires=('sample',), fixed_in", "requires sample: "),
    "no comma": ("binding.py", '"how"),),', '"how")),', "TypeError: 'Option' object is not it"),
    "another kind": ("binding.py", 'upstream=(Link("#1", ', "upstream=((", "is no Link"),
    "no choice": ("binding.py", '"mode", "soft"', '"mode", "odd"', "mode is 'odd'; the choices"),
}  # fmt: skip

EVERYWHERE = """
from ds_patches.core.state import State

found = ds_patches.status()
assert found["sample"].state is State.BROKEN, found["sample"]
assert REASON in found["sample"].reason, found["sample"]
assert found["second"].state is State.READY

for alone in (ds_patches.apply, lambda name: ds_patches.apply_all(only=name)):
    with pytest.raises(ds_patches.BrokenPatch) as error:
        alone("sample")
    assert REASON in str(error.value)
assert ds_patches.apply_all(skip="sample")["sample"].state is State.DISABLED

found = ds_patches.apply_all(options={"sample": {"mode": "hard"}})
assert found["sample"].state is State.BROKEN and found["second"].live
with pytest.raises(ds_patches.PatchNotApplied) as refusal:
    ds_patches.apply_all(strict=True)
assert [status.name for status in refusal.value.statuses] == ["sample"]
assert not ds_patches.is_applied("sample") and ds_patches.is_applied("second")
assert ds_patches.unapply_all()["second"].state is State.REVERTED
"""

#: No other patch is wanted.
BOTH = {"DS_PATCHES": "sample,second"}


@pytest.fixture
def place(tmp_path: Path) -> fake.Place:
    """A distribution that declares `sample`, and a sound patch `second`."""
    found = fake.Place(tmp_path, "second")
    found.path.append(distribution(tmp_path / "site"))
    return found


def broken(place: fake.Place, why: str) -> str:
    """Break the sample in one way; return the reason that is to be given."""
    file, old, new, reason = FOLDERS[why]
    path = place.root / "site/our_patches/sample" / file
    if old is None:
        path.unlink()
    else:
        path.write_text(fake.edited(path.read_text(), old, new) if old else new)
    return reason


@pytest.mark.parametrize("why", FOLDERS)
def test_a_broken_patch_says_so_and_others_go_on(place: fake.Place, why: str) -> None:
    done = place.run(f"REASON = {broken(place, why)!r}\n{EVERYWHERE}", **BOTH)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "sample" in line]
    assert len(told) == 2, "once for each of the two calls that want it"
    assert all(line.startswith("ds_patches: sample is not applied, broken: ") for line in told)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("why", ["no json", "zero division", "no such patch"])
def test_one_that_is_switched_off_is_disabled_and_silent(place: fake.Place, why: str) -> None:
    broken(place, why)
    code = 'print(ds_patches.apply_all(strict=True)["sample"].state.value)'
    for flags in (
        {"DS_PATCHES_SAMPLE": "0", "DS_PATCHES_SAMPLE_MODE": "hard"},
        {"DS_PATCHES_SKIP": "sample"},
        {"DS_PATCHES": "second"},
    ):
        done = place.run(code, **(BOTH | flags))
        assert done.stdout == "disabled\n", done.stderr
        assert "sample" not in done.stderr


def test_its_variables_mean_what_they_may(place: fake.Place) -> None:
    broken(place, "zero division")
    code = "print([s.state.value for s in list(ds_patches.status().values())[-2:]])"
    for value in ("1", "all"):  # the second of an option that nobody can know now
        states = place.output(code, DS_PATCHES="none", DS_PATCHES_SAMPLE=value)
        assert states == "['disabled', 'broken']\n"


@pytest.mark.parametrize("why", ["no json", "zero division"])
def test_the_commands_go_on(place: fake.Place, why: str) -> None:
    reason = broken(place, why)
    done = place.command("status", **BOTH)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sample "))
    assert (done.returncode, line.split()[1]) == (0, "broken")
    assert reason in line
    assert place.command("status", "--verbose", **BOTH).returncode == 0
    shown = place.command("status", "--json", **BOTH).stdout
    assert json.loads(shown)["sample"]["state"] == "broken"
    done = place.command("doctor", **BOTH)
    assert done.returncode == 1
    assert re.search("sample +broken, ", done.stdout)
    assert re.search("second +would apply", done.stdout)
    assert "what DeepSpeed 0.19.8 gets wrong" in done.stdout
    assert place.command("doctor", DS_PATCHES_SAMPLE="0", **BOTH).returncode == 0
    done = place.command("status", "sample", **BOTH)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_patch_of_this_package_is_no_exception(place: fake.Place) -> None:
    fake.write(place.patches / "second/__init__.py", "import = 1")
    code = 'found = ds_patches.apply_all(); print(found["sample"].live, found["second"])'
    said = place.output(code)
    assert said.startswith("True second is broken: ds_patches.second.binding cannot be read: Synt")


def test_of_two_with_one_name_the_first_goes_on(tmp_path: Path) -> None:
    site = distribution(tmp_path / "site", "zero3_retain", "our_patches.zero3_retain")
    code = """
import ds_patches
one, other = [s for s in ds_patches.status().values() if "zero3_retain" in s.name]
print(one)
print(other)
"""
    begin = "our_patches.zero3_retain is "
    for flags, told in (
        ({}, "broken: our_patches.zero3_retain: there is a patch named 'zero3_retain' in ds_"),
        ({"DS_PATCHES_SKIP": "our_patches.zero3_retain"}, "disabled: DS_PATCHES_SKIP=our_"),
        ({"DS_PATCHES_OUR_PATCHES_ZERO3_RETAIN": "0"}, "disabled: DS_PATCHES_OUR_PATCHES_ZERO"),
        ({"DS_PATCHES": "zero3_retain"}, "disabled: DS_PATCHES=zero3_retain"),
    ):
        one, other = fake.output(code, site, **flags).splitlines()
        assert one.startswith("zero3_retain is ready: "), one
        assert other.startswith(begin + told), other


@pytest.mark.parametrize("why", ["no json", "zero division"])
def test_what_requires_a_broken_one_is_blocked(place: fake.Place, why: str) -> None:
    reason = broken(place, why)
    place.edit("second/binding.py", "fixed_in", "requires=('sample',), fixed_in")
    code = """
print(ds_patches.status()["second"])
print(ds_patches.apply_all(only="second")["second"])
"""
    for line in place.output(code, **BOTH).splitlines():
        assert line.startswith("second is blocked: needs sample, which is broken: our_patches.")
        assert reason in line


ENGINE = "runtime/engine.py"
#: Of a DeepSpeed: file, old and new text, whether the source says it, and a part of the reason.
RELEASES = {
    "in a target": (ENGINE, "return (\"forward\"", "return ((", True, "(engine.py, line "),
    "elsewhere": (ENGINE, "class Pipeline(Engine):", "class Pipe line:", False, "SyntaxError: "),
    "not text": (ENGINE, "class Relied:", "# coding: no\nclass Relied:", True, "encoding"),
    "at the end": ("__init__.py", "import engine", "import engine\n1 / 0", False, "ZeroDivision"),
    "of a module": (ENGINE, "class Relied:", "import no\nclass Relied:", False, "No module named"),
}  # fmt: skip

ALL_BROKEN = """
from ds_patches.core.state import State

before = ds_patches.status()
found = ds_patches.apply_all()
with pytest.raises(ds_patches.PatchNotApplied) as refusal:
    ds_patches.apply_all(strict=True)
assert [status.name for status in refusal.value.statuses] == ["second", "sample"]
for seen in (*[before] * SEEN, found, ds_patches.status()):
    for name in ("sample", "second"):
        assert seen[name].state is State.BROKEN, seen[name]
        assert seen[name].reason.startswith("the import of deepspeed")
        assert REASON in seen[name].reason, seen[name]
with pytest.raises(ds_patches.PatchNotApplied) as refusal:
    ds_patches.apply("sample")
assert REASON in str(refusal.value)
"""


@pytest.mark.parametrize("why", RELEASES)
def test_a_broken_deepspeed_says_so(place: fake.Place, why: str) -> None:
    file, old, new, seen, reason = RELEASES[why]
    path = place.deepspeed / "deepspeed" / file
    path.write_text(fake.edited(path.read_text(), old, new))
    done = place.run(f"SEEN, REASON = {seen}, {reason!r}\n{ALL_BROKEN}", **BOTH)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert done.stderr.count(" is not applied, broken: the import of ") == len(lines) == 4
    done = place.command("doctor", **BOTH)
    assert done.returncode == 2 * seen, "nobody can tell"
    found = re.findall("^  (?:sample|second) +broken, the import", done.stdout, re.MULTILINE)
    assert len(found) == 2 * seen
    assert place.command("status", "sample", **BOTH).returncode == 0, "the patch itself is not"
