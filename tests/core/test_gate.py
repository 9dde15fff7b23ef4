"""The gate on fake DeepSpeed trees: version and structure, each in a fresh bare interpreter."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core import fake

#: What every release before 0.19.0 has, and what those since have.
OLD = fake.ENGINE
NEW = fake.edited(fake.edited(OLD, "limit = 3", "limit = 4"), '("build"', '("built"')
#: Files that no release has.
COMMENTED = f"{OLD}# A comment.\n"
REWORDED = fake.edited(
    fake.edited(NEW, "Module level function.", "Other words."),
    "class Engine:",
    "# a comment\nclass Engine:\n    '''Documented.'''\n",
)
RESHAPED = fake.edited(NEW, "self.factor, x)", "self.factor, x + 0)")
NO_NORM = fake.edited(NEW, "def norm", "def norm_renamed")
FACT_CHANGED = fake.edited(NEW, "limit = 4", "limit = 5")

PRINT = """
import json, sys
from ds_patches.core import gate, registry
verdict = gate.check(registry.patch("sample"), {force})
assert not {{"torch", "deepspeed", "wrapt"}} & set(sys.modules), "the gate imports nothing"
print(json.dumps([verdict.state.value, verdict.reason, str(verdict.release)]))
"""

#: Judges the sample by a version and a source; returns state, reason and the release.
Judge = Callable[..., tuple[str, str, str]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    libraries = fake.dependencies(tmp_path / "lib")
    patches = fake.patch_folder(tmp_path / "patches")
    fake.record(patches, {OLD: "0.16.0-0.17.0, 0.17.2-0.18.9", NEW: "0.19.0-0.19.8"})

    def judge(version: str | None = "0.19.8", engine: str = NEW, force: bool = False,
              checkout: str = "", elsewhere: bool = False) -> tuple[str, str, str]:  # fmt: skip
        tree = fake.deepspeed(tmp_path / "tree", version, engine)
        if checkout:
            fake.write(tree / "version.txt", f"{checkout}\n")
        if elsewhere:
            (metadata,) = tree.glob("*.dist-info")
            metadata.rename(fake.write(tmp_path / "site/x", "").with_name(metadata.name))
        code = fake.with_patches(patches) + PRINT.format(force=force)
        done = fake.run(code, libraries, tmp_path / "site", tree, bare=True)
        return tuple(json.loads(done.stdout))

    return judge


HERE = "0.19.8"
NEWER = ("0.19.9", "0.19.8.post1", "0.19.9.dev0")
READY, OUT, REFUSED = "ready", "out of range", "refused"


@pytest.mark.parametrize(
    ("version", "engine", "force", "state", "words"),
    [
        *((version, OLD, False, READY, "") for version in ("0.16.0", "0.18.9")),
        ("0.17.1", OLD, False, READY, ""),  # not recorded: compared with 0.17.0
        *((v, NEW, False, READY, "") for v in ("0.19.3", HERE, "0.19.8rc1", "0.19.8+abc1234")),
        *((v, OLD, force, OUT, "") for v in ("0.15.4", "0.16.0rc1") for force in (False, True)),
        # every shape is known
        *((version, NEW, False, REFUSED, "DS_PATCHES_FORCE=sample") for version in NEWER),
        *((version, NEW, True, READY, "") for version in (*NEWER, "0.20.0")),
        *((v, RESHAPED, False, REFUSED, "ne:Engine.forward") for v in (HERE, "0.19.9")),
        *((version, RESHAPED, True, READY, "forced") for version in (HERE, "0.19.9")),
        # a fact is gated like a target
        (HERE, FACT_CHANGED, False, REFUSED, "Relied"),
        *((HERE, NO_NORM, force, REFUSED, "Engine.norm is absent") for force in (False, True)),
        # words are no structure
        (HERE, REWORDED, False, READY, ""),
        # code has to be of the release that it says
        ("0.16.5", NEW, False, REFUSED, "Relied is that of 0.19.0-0.19.8"),
        ("0.16.5", NEW, True, READY, "forced"),
        ("0.19.0", OLD, False, REFUSED, "Relied is that of 0.16.0-0.17.0, 0.17.2-0.18.9"),
        ("0.18.9", COMMENTED, False, READY, ""),
        ("0.19.0", COMMENTED, False, REFUSED, "Relied is that of 0.16.0-0.17.0, 0.17.2-0.18.9"),
        (None, OLD, False, REFUSED, "version is unknown: no release"),
        ("0.19.0-vendor_build7", NEW, False, REFUSED, "is 0.19.0-vendor_build7: no release"),
    ],
)
def test_version_and_structure(
    judge: Judge, version: str | None, engine: str, force: bool, state: str, words: str
) -> None:
    judged, reason, release = judge(version, engine, force)
    assert (judged, words in reason) == (state, True), reason
    assert release == ("None" if ": no release" in words else str(version).partition("+")[0])


def test_a_target_that_is_left_out_is_compared_too(judge: Judge, tmp_path: Path) -> None:
    """Code of 0.18.9 that calls itself 0.19.0, for which the patch leaves a target out."""
    newer = fake.edited(OLD, '("norm", x)', '("normed", x)')
    norm = '"Engine.norm", HERE + ":mark"'
    fake.edit(tmp_path / "patches/sample/binding.py", norm, f'{norm}, releases="<=0.18.9"')
    fake.record(tmp_path / "patches", {OLD: "0.16.0-0.18.9", newer: "0.19.0-0.19.8"})
    assert judge("0.18.9", OLD)[0] == judge("0.19.0", newer)[0] == READY
    state, reason, _ = judge("0.19.0", OLD)
    assert (state, "Engine.norm is that of 0.16.0-0.18.9" in reason) == (REFUSED, True)


def test_code_of_later_releases_alone_is_fixed_here(judge: Judge, tmp_path: Path) -> None:
    """A build of an older release with the fix of a newer one, for which the patch is not."""
    later = OLD
    for old in ('"scale", x', "self.factor, x", '"norm", x'):
        later = fake.edited(later, old, old.replace(" x", " +x"))
    binding = tmp_path / "patches/sample/binding.py"
    fake.edit(binding, "<=0.19.8", "<=0.18.9")
    fake.record(tmp_path / "patches", {OLD: "0.16.0-0.18.9", later: "0.19.0-0.19.8"})
    assert judge("0.18.9", OLD)[0] == READY
    state, reason, _ = judge("0.18.9", later)
    assert (state, reason) == (OUT, "DeepSpeed 0.18.9 has later code, in which it is fixed")
    half = fake.edited(later, '"norm", +x', '"norm", x')
    assert judge("0.18.9", half)[0] == REFUSED
    # Code of releases before the first that the patch is for is not later.
    fake.edit(binding, ">=0.16.0,<=0.18.9", ">=0.19.0,<=0.19.8")
    assert judge("0.18.9", OLD)[:2] == (OUT, "DeepSpeed 0.18.9 is not in >=0.19.0,<=0.19.8")
    state, reason, _ = judge("0.19.2", OLD)
    assert (state, "is that of 0.16.0-0.18.9" in reason) == (REFUSED, True)


def test_a_checkout_says_itself_what_it_is(judge: Judge) -> None:
    """The metadata of an editable install is of the day it was made, or of another copy."""
    for version, elsewhere in (("0.16.5", True), (None, False)):
        state, _, release = judge(version, checkout="0.19.2", elsewhere=elsewhere)
        assert (state, release) == (READY, "0.19.2")
    state, reason, _ = judge(None, checkout="0.19.9")
    assert (state, "newer than" in reason) == (REFUSED, True)
    state, reason, _ = judge("0.16.0", elsewhere=True)
    assert (state, "version is unknown" in reason) == (REFUSED, True)


@pytest.mark.parametrize("when", ["before the call", "at the import", "of an edited file"])
def test_a_function_replaced_before_us_is_named(place: fake.Place, when: str) -> None:
    """The source on disk is right, the live function is not: only the live look tells."""
    if when == "of an edited file":
        fake.deepspeed(place.deepspeed, engine=COMMENTED)
    fake.write(place.deepspeed / "other_library.py", "def forward(self, x):\n    return x\n")
    code = "import deepspeed.runtime.engine as engine, other_library\n"
    replace = f"{code}engine.Engine.forward = other_library.forward\n"
    if when == "at the import":
        fake.write(place.deepspeed / "deepspeed/__init__.py", replace)
        replace = ""
    code = f"""{replace}
status = ds_patches.apply_all(only="sample")["sample"]
assert status.state.value == "refused", status
assert "live from other_library (" in status.reason
{code}
assert engine.Engine.forward is other_library.forward
"""
    place.run(code)


def test_a_file_that_has_changed_since_its_import_is_not_believed(place: fake.Place) -> None:
    """Both states of it are of releases: which one runs, the lines tell."""
    newer = fake.edited(OLD, "def scale(x)", "LIMIT = 4\n\n\ndef scale(x)")
    fake.record(place.patches, {OLD: "0.16.0-0.17.0", newer: "0.17.2-0.19.8"})
    code = f"""
        import deepspeed.runtime.engine
        fake.deepspeed(fake.Path({str(place.deepspeed)!r}), "0.19.8", {newer!r})
        status = ds_patches.apply_all(only="sample")["sample"]
        assert status.state.value == "refused", status
        assert "engine:scale is unreadable, live from" in status.reason
    """
    place.run(code)
