"""The gate on fake DeepSpeed trees: version and structure, each in a fresh bare interpreter."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.core import fake

RESHAPED = fake.edited(fake.ENGINE, "self.factor, x)", "self.factor, x + 0)")
NO_NORM = fake.edited(fake.ENGINE, "def norm", "def norm_renamed")
FACT_CHANGED = fake.edited(fake.ENGINE, "limit = 3", "limit = 4")
NO_LATER = fake.ENGINE + "# unchanged, in a release that should have more"
DRIFTED = (RESHAPED, NO_NORM, FACT_CHANGED, NO_LATER)
REWORDED = fake.edited(
    fake.edited(fake.ENGINE, "Module level function.", "Other words."),
    "class Engine:",
    "# a comment\nclass Engine:\n    '''Documented.'''\n",
)

PRINT_VERDICT = """
import json, sys
from ds_patches.core import gate, registry
verdict = gate.check(registry.patch("sample"), gate.Force({force}))
drift = [d.place.key for d in verdict.drift]
loaded = sorted({{"torch", "deepspeed", "wrapt"}} & set(sys.modules))
print(json.dumps([verdict.state.value, verdict.reason, drift, loaded]))
"""


@pytest.fixture
def verdict(tmp_path: Path) -> Any:
    """Return a function that judges the sample patch on a fake DeepSpeed: state and reason."""
    libraries = fake.dependencies(tmp_path / "lib")

    def judge(
        version: str | None = "0.19.8",
        engine: str = fake.ENGINE,
        *,
        force: int = 0,
        fixed_in: str | None = None,
        installed: bool = True,
    ) -> tuple[str, str]:
        patches = fake.patch_folder(tmp_path / "patches", fixed_in=fixed_in)
        path = [libraries]
        if installed:
            path.append(fake.deepspeed(tmp_path / "deepspeed", version, engine))
        code = fake.with_patches(patches) + PRINT_VERDICT.format(force=force)
        state, reason, drift, loaded = json.loads(fake.output(code, *path, bare=True))
        assert loaded == [], "the gate imports nothing"
        assert bool(drift) == (engine in DRIFTED)
        return state, reason

    return judge


@pytest.mark.parametrize(
    "version",
    ["0.16.0", "0.17.3", "0.19.8", "0.19.8rc1", "0.18.0.dev3", "0.19.8+abc1234"],
)
def test_supported_releases_are_ready(verdict: Any, version: str) -> None:
    assert verdict(version)[0] == "ready"


@pytest.mark.parametrize("version", ["0.15.4", "0.16.0rc1", "0.16.0.dev1", "0.15.9+abc1234"])
def test_older_is_out_of_range_and_no_force_helps(verdict: Any, version: str) -> None:
    assert verdict(version)[0] == "out of range"
    assert verdict(version, force=2)[0] == "out of range"


@pytest.mark.parametrize("version", ["0.19.9", "0.19.8.post1", "0.19.9.dev0", "0.19.10+abc1234"])
def test_newer_with_known_shapes_is_an_unknown_version(verdict: Any, version: str) -> None:
    state, reason = verdict(version)
    assert state == "unknown version"
    assert "DS_PATCHES_FORCE=sample" in reason
    assert verdict(version, force=1)[0] == "ready"


def test_a_target_of_later_releases_is_asked_for_there(verdict: Any) -> None:
    # The sample has a target `Engine.later` from 0.20 on; the fake tree does not have it.
    assert verdict("0.19.9", force=1)[0] == "ready"
    state, reason = verdict("0.20.0", NO_LATER, force=1)
    assert state == "shape changed"
    assert "Engine.later is absent" in reason


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9"])
def test_a_changed_shape_is_refused_unless_forced_by_name(verdict: Any, version: str) -> None:
    for force in (0, 1):
        state, reason = verdict(version, RESHAPED, force=force)
        assert state == "shape changed"
        assert "deepspeed.runtime.engine:Engine.forward" in reason
    state, reason = verdict(version, RESHAPED, force=2)
    assert state == "ready"
    assert "forced" in reason


def test_a_fact_is_gated_like_a_target(verdict: Any) -> None:
    state, reason = verdict(engine=FACT_CHANGED)
    assert state == "shape changed"
    assert "Relied" in reason


def test_a_missing_target_is_named_and_cannot_be_forced(verdict: Any) -> None:
    for force in (0, 1, 2):
        state, reason = verdict(engine=NO_NORM, force=force)
        assert state == "shape changed"
        assert "Engine.norm is absent" in reason


def test_words_are_no_structure(verdict: Any) -> None:
    assert verdict(engine=REWORDED)[0] == "ready"


def test_not_installed(verdict: Any) -> None:
    assert verdict(installed=False)[0] == "not installed"


def test_fixed_upstream(verdict: Any) -> None:
    assert verdict("0.19.7", fixed_in="0.19.8")[0] == "ready"
    assert verdict("0.19.8", fixed_in="0.19.8")[0] == "fixed upstream"
    assert verdict("0.19.9", RESHAPED, fixed_in="0.19.8", force=2)[0] == "fixed upstream"


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


PRINT_RELEASE = """
import json
from ds_patches.core import gate, registry
verdict = gate.check(registry.patch("sample"), gate.Force({force}))
print(json.dumps([verdict.state.value, verdict.reason, str(verdict.release)]))
"""
#: Of 0.19.0 and later; the other one is of the releases before.
TWO_CHANGES = fake.edited(RESHAPED, "limit = 3", "limit = 4")


@pytest.fixture
def by_source(tmp_path: Path) -> Any:
    """Return a function that judges a source, recorded of two eras, by whatever version is told."""
    patches = fake.patch_folder(tmp_path / "patches")
    recorded = patches / "sample/shapes.json"
    old = json.loads(recorded.read_text())
    fake.patch_folder(tmp_path / "newer", shapes_of=TWO_CHANGES)
    new = json.loads((tmp_path / "newer/sample/shapes.json").read_text())
    for place, shapes in new.items():
        if shapes != old[place]:
            before = dict.fromkeys(old[place], "0.16.0-0.17.0, 0.17.2-0.18.9")
            old[place] = before | dict.fromkeys(shapes, "0.19.0-0.19.8")
    recorded.write_text(json.dumps(old))
    libraries = fake.dependencies(tmp_path / "lib")

    def judge(
        version: str | None,
        engine: str,
        *,
        force: int = 0,
        checkout: str = "",
        editable: bool = False,
    ) -> tuple[str, str, str]:
        tree = fake.deepspeed(tmp_path / "tree", version, engine)
        if checkout:
            fake.write(tree / "version.txt", f"{checkout}\n")
        if editable:
            (metadata,) = tree.glob("*.dist-info")
            fake.write(metadata / "direct_url.json", '{"dir_info": {"editable": true}}')
            metadata.rename(fake.write(tmp_path / "site/x", "").with_name(metadata.name))
        code = fake.with_patches(patches) + PRINT_RELEASE.format(force=force)
        return tuple(json.loads(fake.output(code, libraries, tmp_path / "site", tree, bare=True)))

    return judge


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
    by_source: Any, told: str | None, engine: str, taken_for: str
) -> None:
    state, reason, release = by_source(told, engine)
    assert (state, release) == ("ready", taken_for)
    assert ("by its source" in reason) == (told != taken_for)
    assert told == taken_for or (told or "unknown") in reason


def test_no_release_is_half_of_one_and_half_of_another(by_source: Any) -> None:
    for told in ("0.19.3", "0.16.5", None):
        state, reason, _ = by_source(told, RESHAPED)
        assert state == "shape changed"
        expected = (
            "Engine.forward is that of 0.19.0-0.19.8" if told == "0.16.5" else "Relied is that of"
        )
        assert expected in reason
        assert by_source(told, RESHAPED, force=2)[0] == "ready"


def test_a_release_without_a_shape_does_not_have_it_from_its_neighbours(by_source: Any) -> None:
    assert by_source("0.17.2", fake.ENGINE)[2] == "0.17.2"
    state, reason, release = by_source("0.17.1", fake.ENGINE)
    assert (state, release) == ("ready", "0.17.0")
    assert "0.17.1" in reason


def test_a_checkout_says_itself_what_it_is(by_source: Any) -> None:
    """The metadata of an editable install is of the day it was made."""
    for version, editable in (("0.16.5", True), (None, False)):
        state, reason, release = by_source(
            version, TWO_CHANGES, checkout="0.19.2", editable=editable
        )
        assert (state, release) == ("ready", "0.19.2")
        assert "by its source" not in reason
    assert by_source(None, TWO_CHANGES, checkout="0.19.9")[0] == "unknown version"


def test_an_engine_replaced_before_us_is_named(tmp_path: Path) -> None:
    """The source on disk is right, the live function is not: only the live look tells."""
    patches = fake.patch_folder(tmp_path / "patches")
    installation = fake.deepspeed(tmp_path / "deepspeed")
    fake.write(tmp_path / "deepspeed/other_library.py", "def forward(self, x):\n    return x\n")
    code = """
        import deepspeed.runtime.engine as engine, other_library
        engine.Engine.forward = other_library.forward
        status = ds_patches.apply_all(only="sample")["sample"]
        print(status.state.value, "|", status.reason)
        assert engine.Engine.forward is other_library.forward
    """
    printed = fake.output(fake.with_patches(patches) + textwrap.dedent(code), installation)
    assert printed.startswith("shape changed |")
    assert "live from other_library (" in printed


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
        print("done")
    """
    assert fake.output(code, installation) == "done\n"
