"""Waiting for an import: when what was awaited happens, and that nothing is left of the wait."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest

from ds_patches.core import imports
from tests.core import fake
from tests.startup.environment import Environment

NAMES = ("awaited_one", "awaited_two")
ONE, TWO = NAMES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, for modules with NAMES; afterwards nothing of ours may be left."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)
    left = imports.awaited(NAMES)
    imports._watch.hooks.clear()
    assert not left
    assert imports._watch not in sys.meta_path
    assert not imports._watch.executed


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def whole(folder: Path, calls: list[str]) -> list[str]:
    """A module that is awaited; afterwards it says "whole"."""
    module(folder)
    imports.add_post_import_hook(ONE, lambda: calls.append("whole"))
    return calls


def module(folder: Path, name: str = ONE, text: str = "answer = 42") -> Path:
    return fake.write(folder / f"{name}.py", text)


def test_an_absent_module_is_awaited_and_then_whole(folder: Path, calls: list[str]) -> None:
    module(folder, text="before = 1\nanswer = 42")
    imports.add_post_import_hook(ONE, lambda: calls.append(str(sys.modules[ONE].answer)))
    imports.add_post_import_hook(ONE, lambda: calls.append(str(imports.is_whole(ONE))))
    assert not calls
    assert not imports.is_whole(ONE)
    assert imports.awaited(NAMES) == [ONE]
    assert sys.meta_path[0] is imports._watch
    importlib.import_module(ONE)
    assert calls == ["42", "True"], "after its last line, before its importer goes on"
    assert imports._watch not in sys.meta_path


@pytest.mark.parametrize(
    "stand_in", [types.ModuleType(ONE), types.SimpleNamespace(), object()], ids=type
)
def test_what_is_loaded_is_whole_now(folder: Path, calls: list[str], stand_in: object) -> None:
    """Whatever it is: tests of programs put anything in the place of DeepSpeed."""
    sys.modules[ONE] = stand_in
    imports.add_post_import_hook(ONE, lambda: calls.append("now"))
    assert calls == ["now"]


def test_a_half_imported_module_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(folder, text="import sys; sys.within()")
    said: list[object] = []

    def within() -> None:
        said.append(imports.is_whole(ONE))
        with pytest.raises(ImportError, match="awaited_one is half imported"):
            imports.add_post_import_hook(ONE, lambda: said.append("called"))

    monkeypatch.setattr(sys, "within", within, raising=False)
    importlib.import_module(ONE)
    assert said == [False]
    assert imports.is_whole(ONE)


def test_an_import_that_fails_is_awaited_on(folder: Path, calls: list[str]) -> None:
    path = module(folder, text="raise ValueError('not yet')")
    imports.add_post_import_hook(ONE, lambda: calls.append("whole"))
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            importlib.import_module(ONE)
    assert (calls, imports.awaited(NAMES)) == ([], [ONE])
    fake.write(path, "answer = 'of another length'")
    importlib.import_module(ONE)
    assert calls == ["whole"]


def test_what_an_action_raises_the_import_raises(folder: Path, calls: list[str]) -> None:
    """Swallowed, it must not let the next import pass as if all were well."""
    module(folder)

    def refuse() -> None:
        calls.append("refused")
        raise SystemExit("no")

    imports.add_post_import_hook(ONE, refuse)
    for _ in range(2):
        with pytest.raises(SystemExit, match="no"):
            importlib.import_module(ONE)
        assert ONE not in sys.modules
    assert calls == ["refused"] * 2
    imports.remove_post_import_hook(ONE, refuse)
    importlib.import_module(ONE)
    assert calls == ["refused"] * 2


def test_looking_for_it_is_not_importing_it(folder: Path, whole: list[str]) -> None:
    """As programs do to learn whether DeepSpeed is installed."""
    for _ in range(3):
        spec = importlib.util.find_spec(ONE)
        assert spec is not None
        assert spec.origin == str(folder / f"{ONE}.py")
    assert importlib.util.find_spec(TWO) is None
    assert not whole
    importlib.import_module(ONE)
    assert whole == ["whole"]


def test_the_loader_is_pythons_own_with_nothing_left_on_it(folder: Path, whole: list[str]) -> None:
    module(folder, TWO)
    awaited, bare = importlib.import_module(ONE), importlib.import_module(TWO)
    assert awaited.__spec__ is not None
    loader = awaited.__spec__.loader
    assert type(loader) is SourceFileLoader is type(bare.__loader__)
    assert awaited.__loader__ is loader
    assert vars(loader).keys() == vars(bare.__loader__).keys()
    assert inspect.getsource(awaited) == "answer = 42\n"
    assert importlib.reload(awaited) is awaited
    assert whole == ["whole"], "a reload is no first import"


def test_in_a_zip_file_where_all_modules_share_a_loader(folder: Path, calls: list[str]) -> None:
    with zipfile.ZipFile(folder / "some.zip", "w") as archive:
        for name in NAMES:
            archive.writestr(f"{name}.py", "answer = 42")
    sys.path.insert(0, str(folder / "some.zip"))  # the fixture's path goes with it
    imports.add_post_import_hook(TWO, lambda: calls.append("whole"))
    assert importlib.util.find_spec(TWO)
    assert importlib.util.find_spec(TWO)
    other = importlib.import_module(ONE)
    assert not calls
    importlib.import_module(TWO)
    assert calls == ["whole"]
    assert "exec_module" not in vars(other.__loader__)


def test_a_bare_folder_of_that_name_is_not_it(folder: Path, whole: list[str]) -> None:
    """Such as a checkout's, beside the script."""
    (folder / f"{ONE}.py").unlink()
    (folder / ONE).mkdir()
    importlib.import_module(ONE)
    assert not whole
    del sys.modules[ONE]
    fake.write(folder / ONE / "__init__.py", "answer = 42")
    importlib.invalidate_caches()
    importlib.import_module(ONE)
    assert whole == ["whole"]


ASK, LOOK = importlib.util.find_spec, PathFinder.find_spec


@pytest.mark.parametrize(("find", "first"), [(ASK, True), (ASK, False), (LOOK, True)])
def test_beside_other_finders(
    folder: Path, calls: list[str], find: Callable[[str], object], first: bool
) -> None:
    """One asks Python, or looks on the path, and hands on what it got; one is of Python 3.3."""
    under_way: list[str] = []

    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name not in NAMES or under_way:
            return None
        under_way.append(name)
        return find(under_way[0])

    module(folder)
    arm = partial(imports.add_post_import_hook, ONE, lambda: calls.append("whole"))
    of_old = types.SimpleNamespace(find_module=lambda name, path=None: None)
    others = [of_old, types.SimpleNamespace(find_spec=find_spec)]
    add = partial(sys.meta_path.__setitem__, slice(0, 0), others)
    for step in (add, arm) if first else (arm, add):
        step()
    importlib.import_module(ONE)
    assert (under_way, calls) == ([ONE], ["whole"])


WRAPT = """
import sys, wrapt
from ds_patches.core import imports
calls = []
steps = [
    lambda: wrapt.register_post_import_hook(lambda _: calls.append("theirs"), "deepspeed"),
    lambda: imports.add_post_import_hook("deepspeed", lambda: calls.append("ours")),
]
for step in steps[::int(sys.argv[1])]:
    step()
import deepspeed
assert sorted(calls) == ["ours", "theirs"], calls
assert "exec_module" not in vars(deepspeed.__loader__)
"""


@pytest.mark.parametrize("order", ["1", "-1"])
def test_beside_wrapts_import_hooks(environment: Environment, order: str) -> None:
    """Tracing libraries use them; they put a proxy around the loader."""
    done = environment.start("-c", WRAPT, order)
    assert (done.returncode, done.stderr) == (0, "")


def test_forgetting(folder: Path, calls: list[str]) -> None:
    module(folder)
    one, two = (lambda: calls.append("one")), (lambda: calls.append("two"))
    imports.remove_post_import_hook(ONE, one)
    imports.add_post_import_hook(ONE, one)
    imports.add_post_import_hook(ONE, two)
    imports.add_post_import_hook(TWO, two)
    imports.remove_post_import_hook(ONE, one)
    assert imports.awaited(NAMES) == [ONE, TWO]
    imports.remove_post_import_hook(TWO, two)
    assert imports._watch in sys.meta_path
    importlib.import_module(ONE)
    assert calls == ["two"]


def test_another_importer_waits_for_the_action(folder: Path, calls: list[str]) -> None:
    module(folder, text="import sys; sys.started.set(); sys.go_on.wait(10)")
    sys.started, sys.go_on = threading.Event(), threading.Event()
    imports.add_post_import_hook(ONE, lambda: calls.append("whole"))

    def second() -> None:
        importlib.import_module(ONE)
        calls.append("second")

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(importlib.import_module, ONE)]
        assert sys.started.wait(10)
        ended.append(pool.submit(second))
        wait(ended, timeout=0.05)
        sys.go_on.set()
        for one in ended:
            one.result(10)
    del sys.started, sys.go_on
    assert calls == ["whole", "second"]
