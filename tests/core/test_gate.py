"""The gate on fake DeepSpeed trees: version and structure, each in a fresh bare interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core import fake

RESHAPED = fake.edited(fake.ENGINE, "self.factor, x)", "self.factor, x + 0)")
NO_NORM = fake.edited(fake.ENGINE, "def norm", "def norm_renamed")
FACT_CHANGED = fake.edited(fake.ENGINE, "limit = 3", "limit = 4")
REWORDED = fake.edited(
    fake.edited(fake.ENGINE, "Module level function.", "Other words."),
    "class Engine:",
    "# a comment\nclass Engine:\n    '''Documented.'''\n",
)
#: Of 0.19.0 and later, for `by_source`; the other one is of the releases before.
TWO_CHANGES = fake.edited(RESHAPED, "limit = 3", "limit = 4")

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
    """Where every release was recorded with the same source."""
    libraries = fake.dependencies(tmp_path / "lib")
    fake.patch_folder(tmp_path / "patches")

    def judge(version: str | None = "0.19.8", engine: str = fake.ENGINE, force: bool = False,
              checkout: str = "", elsewhere: bool = False) -> tuple[str, str, str]:  # fmt: skip
        tree = fake.deepspeed(tmp_path / "tree", version, engine)
        if checkout:
            fake.write(tree / "version.txt", f"{checkout}\n")
        if elsewhere:
            (metadata,) = tree.glob("*.dist-info")
            metadata.rename(fake.write(tmp_path / "site/x", "").with_name(metadata.name))
        code = fake.with_patches(tmp_path / "patches") + PRINT.format(force=force)
        return tuple(json.loads(fake.output(code, libraries, tmp_path / "site", tree, bare=True)))

    return judge


@pytest.fixture(params=["", "# A file that was not recorded.\n"], ids=["known", "parsed"])
def by_source(request: pytest.FixtureRequest, judge: Judge, tmp_path: Path) -> Judge:
    """Where the releases are of two eras."""
    eras = {fake.ENGINE: "0.16.0-0.17.0, 0.17.2-0.18.9", TWO_CHANGES: "0.19.0-0.19.8"}
    fake.record(tmp_path / "patches", eras)
    return lambda told, engine, **more: judge(told, engine + request.param, **more)


HERE = "0.19.8"
NEWER = ("0.19.9", "0.19.8.post1", "0.19.9.dev0")
OLDER = ("0.15.4", "0.16.0rc1")
TESTED = ("0.16.0", HERE, "0.19.8rc1", "0.19.8+abc1234")
READY, OUT, CHANGED = "ready", "out of range", "shape changed"


@pytest.mark.parametrize(
    ("version", "engine", "force", "state", "told"),
    [
        *((version, fake.ENGINE, False, READY, "") for version in TESTED),
        *((version, fake.ENGINE, force, OUT, "") for version in OLDER for force in (False, True)),
        # every shape is known
        *((v, fake.ENGINE, False, "unknown version", "DS_PATCHES_FORCE=sample") for v in NEWER),
        *((version, fake.ENGINE, True, READY, "") for version in NEWER),
        # which the sample has as a target from there on
        ("0.20.0", fake.ENGINE, True, CHANGED, "Engine.later is absent"),
        *((version, RESHAPED, False, CHANGED, "ne:Engine.forward") for version in (HERE, "0.19.9")),
        *((version, RESHAPED, True, READY, "forced") for version in (HERE, "0.19.9")),
        # a fact is gated like a target
        (HERE, FACT_CHANGED, False, CHANGED, "Relied"),
        *((HERE, NO_NORM, force, CHANGED, "Engine.norm is absent") for force in (False, True)),
        # words are no structure
        (HERE, REWORDED, False, READY, ""),
    ],
)
def test_version_and_structure(
    judge: Judge, version: str, engine: str, force: bool, state: str, told: str
) -> None:
    found, reason, _ = judge(version, engine, force)
    assert found == state
    assert told in reason


def test_metadata_of_another_copy_is_not_taken(tmp_path: Path) -> None:
    source = fake.deepspeed(tmp_path / "source", None)
    other = fake.deepspeed(tmp_path / "other", "0.16.0")
    code = "from ds_patches.core import release; print(release.installed().text)"
    libraries = fake.dependencies(tmp_path / "lib")
    assert fake.output(code, libraries, source, other, bare=True) == "unknown\n"
    assert fake.output(code, libraries, other, source, bare=True) == "0.16.0\n"


@pytest.mark.parametrize(
    ("told", "engine", "taken_for"),
    [
        ("0.19.3", TWO_CHANGES, "0.19.3"),
        ("0.16.5", TWO_CHANGES, "0.19.0"),
        ("0.19.0", fake.ENGINE, "0.18.9"),
        ("0.17.1", fake.ENGINE, "0.17.0"),  # which does not have it from its neighbours
        (None, fake.ENGINE, "0.18.9"),
        ("0.19.0-vendor_build7", TWO_CHANGES, "0.19.8"),
    ],
)
def test_a_release_is_what_its_source_is(
    by_source: Judge, told: str | None, engine: str, taken_for: str
) -> None:
    state, reason, release = by_source(told, engine)
    assert (state, release) == ("ready", taken_for)
    assert ("by its source" in reason) == (told != taken_for)
    assert told == taken_for or (told or "unknown") in reason


def test_no_release_is_half_of_one_and_half_of_another(by_source: Judge) -> None:
    for told in ("0.19.3", "0.16.5", None):
        state, reason, _ = by_source(told, RESHAPED)
        assert state == "shape changed"
        assert ("Engine.forward is that of" if told == "0.16.5" else "Relied is that of") in reason
        assert by_source(told, RESHAPED, force=True)[0] == "ready"


def test_code_of_later_releases_alone_is_fixed_here(judge: Judge, tmp_path: Path) -> None:
    """A build of an older release with the fix of a newer one, for which the patch is not."""
    later = fake.ENGINE
    for old, new in (('"scale", x', '"scaled", x'), ("self.factor, x)", "self.factor, +x)"),
                     ('"norm", x', '"normed", x')):  # fmt: skip
        later = fake.edited(later, old, new)
    binding = tmp_path / "patches/sample/binding.py"
    text = fake.edited(fake.BINDING, "<=0.19.8", "<=0.18.9")
    text = fake.edited(
        text, '        Target(MODULE, "Engine.extra", HERE + ":add", adds=True),\n', ""
    )
    binding.write_text(text, encoding="utf-8")
    fake.record(tmp_path / "patches", {fake.ENGINE: "0.16.0-0.18.9", later: "0.19.0-0.19.8"})
    assert judge("0.18.9")[0] == READY
    state, reason, _ = judge("0.18.9", later)
    assert (state, reason) == (OUT, "DeepSpeed 0.18.9 has later code, in which it is fixed")
    half = fake.edited(later, '"normed", x', '"norm", x')
    assert judge("0.18.9", half)[0] == CHANGED
    # Code of releases before the first that the patch is for is not later.
    binding.write_text(text.replace(">=0.16.0,<=0.18.9", ">=0.19.0,<=0.19.8"), encoding="utf-8")
    assert judge("0.18.9")[:2] == (OUT, "DeepSpeed 0.18.9 is not in >=0.19.0,<=0.19.8")
    state, reason, _ = judge("0.19.2")
    assert (state, "is that of 0.16.0-0.18.9" in reason) == (CHANGED, True)


def test_a_checkout_says_itself_what_it_is(by_source: Judge) -> None:
    """The metadata of an editable install is of the day it was made."""
    for version, elsewhere in (("0.16.5", True), (None, False)):
        state, reason, release = by_source(
            version, TWO_CHANGES, checkout="0.19.2", elsewhere=elsewhere
        )
        assert (state, release) == ("ready", "0.19.2")
        assert "by its source" not in reason
    assert by_source(None, TWO_CHANGES, checkout="0.19.9")[0] == "unknown version"


@pytest.mark.parametrize("where", ["before the call", "at the import", "of an edited file"])
def test_a_function_replaced_before_us_is_named(place: fake.Place, where: str) -> None:
    """The source on disk is right, the live function is not: only the live look tells."""
    if where == "of an edited file":
        fake.deepspeed(place.deepspeed, engine=f"{fake.ENGINE}# Another end.\n")
    fake.write(place.deepspeed / "other_library.py", "def forward(self, x):\n    return x\n")
    code = "import deepspeed.runtime.engine as engine, other_library\n"
    replace = f"{code}engine.Engine.forward = other_library.forward\n"
    if where == "at the import":
        fake.write(place.deepspeed / "deepspeed/__init__.py", replace)
        replace = ""
    code = f"""{replace}
status = ds_patches.apply_all(only="sample")["sample"]
assert status.state.value == "shape changed", status
assert "live from other_library (" in status.reason
{code}
assert engine.Engine.forward is other_library.forward
"""
    place.output(code)


def test_a_file_that_has_changed_since_its_import_is_not_believed(place: fake.Place) -> None:
    """Both states of it are of releases: which one runs, the lines tell."""
    newer = fake.edited(fake.ENGINE, "def scale(x)", "LIMIT = 4\n\n\ndef scale(x)")
    fake.record(place.patches, {fake.ENGINE: "0.16.0-0.17.0", newer: "0.17.2-0.19.8"})
    code = f"""
        import deepspeed.runtime.engine
        fake.deepspeed(fake.Path({str(place.deepspeed)!r}), "0.19.8", {newer!r})
        status = ds_patches.apply_all(only="sample")["sample"]
        assert status.state.value == "shape changed", status
        assert "engine:scale is unreadable, live from" in status.reason
    """
    place.output(code)
