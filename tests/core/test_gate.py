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
verdict = gate.check(registry.patch("sample"), gate.Force({force}))
assert not {{"torch", "deepspeed", "wrapt"}} & set(sys.modules), "the gate imports nothing"
print(json.dumps([verdict.state.value, verdict.reason, str(verdict.release)]))
"""

#: Judges the sample by a version and a source; returns state, reason and the release.
Judge = Callable[..., tuple[str, str, str]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    libraries = fake.dependencies(tmp_path / "lib")

    def judge(version: str | None = "0.19.8", engine: str = fake.ENGINE, force: int = 0,
              checkout: str = "", editable: bool = False) -> tuple[str, str, str]:  # fmt: skip
        tree = fake.deepspeed(tmp_path / "tree", version, engine)
        if checkout:
            fake.write(tree / "version.txt", f"{checkout}\n")
        if editable:
            (metadata,) = tree.glob("*.dist-info")
            fake.write(metadata / "direct_url.json", '{"dir_info": {"editable": true}}')
            metadata.rename(fake.write(tmp_path / "site/x", "").with_name(metadata.name))
        code = fake.with_patches(tmp_path / "patches") + PRINT.format(force=force)
        return tuple(json.loads(fake.output(code, libraries, tmp_path / "site", tree, bare=True)))

    return judge


@pytest.fixture
def verdict(judge: Judge, tmp_path: Path) -> Judge:
    """Where every release has the same source."""
    fake.patch_folder(tmp_path / "patches")
    return judge


@pytest.fixture
def by_source(judge: Judge, tmp_path: Path) -> Judge:
    """Where the releases are of two eras."""
    recorded = fake.patch_folder(tmp_path / "patches") / "sample/shapes.json"
    old = json.loads(recorded.read_text())
    fake.patch_folder(tmp_path / "newer", shapes_of=TWO_CHANGES)
    new = json.loads((tmp_path / "newer/sample/shapes.json").read_text())
    for place, shapes in new.items():
        if shapes != old[place]:
            before = dict.fromkeys(old[place], "0.16.0-0.17.0, 0.17.2-0.18.9")
            old[place] = before | dict.fromkeys(shapes, "0.19.0-0.19.8")
    recorded.write_text(json.dumps(old))
    return judge


HERE = "0.19.8"
NEWER = ("0.19.9", "0.19.8.post1", "0.19.9.dev0", "0.19.10+abc1234")
OLDER = ("0.15.4", "0.16.0rc1", "0.16.0.dev1", "0.15.9+abc1234")
TESTED = ("0.16.0", "0.17.3", HERE, "0.19.8rc1", "0.18.0.dev3", "0.19.8+abc1234")
READY, OUT, CHANGED = "ready", "out of range", "shape changed"


@pytest.mark.parametrize(
    ("version", "engine", "force", "state", "told"),
    [
        *((version, fake.ENGINE, 0, READY, "") for version in TESTED),
        *((version, fake.ENGINE, force, OUT, "") for version in OLDER for force in (0, 2)),
        # every shape is known
        *((v, fake.ENGINE, 0, "unknown version", "DS_PATCHES_FORCE=sample") for v in NEWER),
        *((version, fake.ENGINE, 1, READY, "") for version in NEWER),
        # which the sample has as a target from there on
        ("0.20.0", fake.ENGINE, 1, CHANGED, "Engine.later is absent"),
        # forced by name only
        *((v, RESHAPED, f, CHANGED, "ne:Engine.forward") for v in (HERE, "0.19.9") for f in (0, 1)),
        *((version, RESHAPED, 2, READY, "forced") for version in (HERE, "0.19.9")),
        # a fact is gated like a target
        (HERE, FACT_CHANGED, 0, CHANGED, "Relied"),
        *((HERE, NO_NORM, force, CHANGED, "Engine.norm is absent") for force in (0, 1, 2)),
        # words are no structure
        (HERE, REWORDED, 0, READY, ""),
    ],
)
def test_version_and_structure(
    verdict: Judge, version: str, engine: str, force: int, state: str, told: str
) -> None:
    found, reason, _ = verdict(version, engine, force)
    assert found == state
    assert told in reason


def test_fixed_upstream(verdict: Judge, tmp_path: Path) -> None:
    fake.patch_folder(tmp_path / "patches", fixed_in="0.19.8")
    assert verdict("0.19.7")[0] == "ready"
    assert verdict("0.19.8")[0] == "fixed upstream"
    assert verdict("0.19.9", RESHAPED, force=2)[0] == "fixed upstream"


def test_metadata_of_another_copy_is_not_taken(tmp_path: Path) -> None:
    source = fake.deepspeed(tmp_path / "source", None)
    other = fake.deepspeed(tmp_path / "other", "0.16.0")
    code = "from ds_patches.core import release; print(release.installed().text)"
    libraries = fake.dependencies(tmp_path / "lib")
    assert fake.output(code, libraries, source, other, bare=True) == "unknown\n"
    assert fake.output(code, libraries, other, source, bare=True) == "0.16.0\n"
    editable = '{"url": "file:///x", "dir_info": {"editable": true}}'
    fake.write(other / "deepspeed-0.16.0.dist-info/direct_url.json", editable)
    assert fake.output(code, libraries, source, other, bare=True) == "0.16.0\n"


@pytest.mark.parametrize(
    ("told", "engine", "taken_for"),
    [
        ("0.18.2", fake.ENGINE, "0.18.2"),
        ("0.19.3", TWO_CHANGES, "0.19.3"),
        ("0.16.5", TWO_CHANGES, "0.19.0"),
        ("0.19.0", fake.ENGINE, "0.18.9"),
        (None, TWO_CHANGES, "0.19.8"),
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
        expected = (
            "Engine.forward is that of 0.19.0-0.19.8" if told == "0.16.5" else "Relied is that of"
        )
        assert expected in reason
        assert by_source(told, RESHAPED, force=2)[0] == "ready"


def test_a_release_without_a_shape_does_not_have_it_from_its_neighbours(by_source: Judge) -> None:
    assert by_source("0.17.2", fake.ENGINE)[2] == "0.17.2"
    state, reason, release = by_source("0.17.1", fake.ENGINE)
    assert (state, release) == ("ready", "0.17.0")
    assert "0.17.1" in reason


def test_a_checkout_says_itself_what_it_is(by_source: Judge) -> None:
    """The metadata of an editable install is of the day it was made."""
    for version, editable in (("0.16.5", True), (None, False)):
        state, reason, release = by_source(
            version, TWO_CHANGES, checkout="0.19.2", editable=editable
        )
        assert (state, release) == ("ready", "0.19.2")
        assert "by its source" not in reason
    assert by_source(None, TWO_CHANGES, checkout="0.19.9")[0] == "unknown version"


def test_an_engine_replaced_before_us_is_named(place: fake.Place) -> None:
    """The source on disk is right, the live function is not: only the live look tells."""
    fake.write(place.deepspeed / "other_library.py", "def forward(self, x):\n    return x\n")
    code = """
        import deepspeed.runtime.engine as engine, other_library
        engine.Engine.forward = other_library.forward
        status = ds_patches.apply_all(only="sample")["sample"]
        assert status.state.value == "shape changed"
        assert "live from other_library (" in status.reason
        assert engine.Engine.forward is other_library.forward
    """
    place.output(code)


def test_the_live_look_sees_through_wrappers_that_say_what_they_wrap(tmp_path: Path) -> None:
    installation = fake.deepspeed(tmp_path / "deepspeed")
    fake.write(installation / "deepspeed/utils/__init__.py", "")
    fake.write(installation / "deepspeed/utils/nvtx.py", fake.NVTX)
    code = """
        import functools, sys, wrapt
        from pathlib import Path
        import deepspeed.runtime.engine as engine
        from deepspeed.utils.nvtx import instrument_w_nvtx
        from ds_patches.core import shape
        from ds_patches.core.patch import Place
        place = Place("deepspeed.runtime.engine", "Engine.forward")
        known = shape.of_source(place, Path(engine.__file__).parents[1])
        original = engine.Engine.forward
        def wraps(f):
            @functools.wraps(f)
            def other(*args): return f(*args)
            return other
        def proxies(f):
            return wrapt.FunctionWrapper(f, print)
        for outer in (instrument_w_nvtx, wraps, property, proxies):
            for inner in (instrument_w_nvtx, wraps):
                engine.Engine.forward = outer(inner(original))
                assert shape.of_live(place) == known, (outer, inner)
        def hides(f):
            def other(*args): return f(*args)
            return other
        engine.Engine.forward = hides(original)
        assert shape.of_live(place) == shape.UNREADABLE  # its code comes from no file
        engine.Engine.forward = len
        assert shape.of_live(place) == shape.UNREADABLE
        del engine.Engine.forward
        assert shape.of_live(place) == shape.ABSENT
        del engine.Engine
        assert shape.of_live(place) == shape.ABSENT
    """
    fake.output(code, installation)
