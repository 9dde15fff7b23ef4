"""Waiting for an import: when what was awaited happens, and that nothing is left of the wait."""

import importlib
import importlib.util
import inspect
import sys
import types
import zipfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from ds_patches.core import imports
from tests.core import fake
from tests.startup.environment import Environment

NAMES = ("awaited_one", "awaited_two")
ONE, TWO = NAMES


class Here:
    """A folder on the path for modules with NAMES, and the words of the hooks that have run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def module(self, text: str = "answer = 42", name: str = ONE) -> Path:
        return fake.write(self.folder / f"{name}.py", text)

    def wait(self, name: str = ONE, word: str = "whole") -> None:
        imports.add_post_import_hook(name, lambda: self.said.append(word))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Afterwards nothing of ours may be left."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield Here(tmp_path)
    for name in NAMES:
        sys.modules.pop(name, None)
    assert not imports.awaited(NAMES)
    assert imports._watch not in sys.meta_path
    assert not imports._watch.executed


def test_an_absent_module_is_awaited_and_then_whole(here: Here) -> None:
    here.module("before = 1\nanswer = 42")
    for look in (lambda: sys.modules[ONE].answer, lambda: imports.is_whole(ONE)):
        imports.add_post_import_hook(ONE, lambda look=look: here.said.append(str(look())))
    assert not here.said
    assert not imports.is_whole(ONE)
    assert imports.awaited(NAMES) == [ONE]
    assert sys.meta_path[0] is imports._watch
    importlib.import_module(ONE)
    assert here.said == ["42", "True"], "after its last line, before its importer goes on"
    assert imports._watch not in sys.meta_path


@pytest.mark.parametrize("stand_in", [types.ModuleType(ONE), types.SimpleNamespace(), object()])
def test_what_is_loaded_is_whole_now(here: Here, stand_in: object) -> None:
    """Whatever it is: tests of programs put anything in the place of DeepSpeed."""
    sys.modules[ONE] = stand_in  # type: ignore[assignment]
    here.wait()
    assert here.said == ["whole"]


def test_a_half_imported_module_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.module("import sys; sys.within()")

    def within() -> None:
        here.said.append(str(imports.is_whole(ONE)))
        with pytest.raises(ImportError, match="awaited_one is half imported"):
            here.wait()

    monkeypatch.setattr(sys, "within", within, raising=False)
    importlib.import_module(ONE)
    assert here.said == ["False"]
    assert imports.is_whole(ONE)


def test_after_a_failure_it_is_awaited_on(here: Here) -> None:
    """Of the import or the hook: swallowed, the next must not pass as if all were well."""
    here.module("raise ValueError('not yet')")

    refusals = iter([SystemExit("no"), SystemExit("no")])

    def hook() -> None:
        for refusal in refusals:
            here.said.append("refused")
            raise refusal

    imports.add_post_import_hook(ONE, hook)
    for failure, text, said in ((ValueError, "not yet", []), (SystemExit, "no", ["refused"] * 2)):
        for _ in range(2):
            with pytest.raises(failure, match=text):
                importlib.import_module(ONE)
            assert ONE not in sys.modules
        assert (here.said, imports.awaited(NAMES)) == (said, [ONE])
        here.module("answer = 'of another length'")
    importlib.import_module(ONE)
    assert here.said == ["refused"] * 2, "the third time it is content"


def test_the_loader_is_pythons_own_with_nothing_left_on_it(here: Here) -> None:
    here.module()
    here.module(name=TWO)
    here.wait()
    awaited, bare = map(importlib.import_module, NAMES)
    assert awaited.__spec__ is not None
    loader = awaited.__spec__.loader
    assert type(loader) is SourceFileLoader is type(bare.__loader__)
    assert awaited.__loader__ is loader
    assert vars(loader).keys() == vars(bare.__loader__).keys()
    assert inspect.getsource(awaited) == "answer = 42\n"
    assert importlib.reload(awaited) is awaited
    assert here.said == ["whole"], "a reload is no first import"


def test_looking_for_it_is_not_importing_it_also_where_modules_share_a_loader(here: Here) -> None:
    """As those of a zip file do."""
    with zipfile.ZipFile(here.folder / "some.zip", "w") as archive:
        for name in NAMES:
            archive.writestr(f"{name}.py", "answer = 42")
    sys.path.insert(0, str(here.folder / "some.zip"))  # the fixture's path goes with it
    here.wait(TWO)
    for _ in range(2):  # as programs do to learn whether DeepSpeed is installed
        spec = importlib.util.find_spec(TWO)
        assert spec is not None
        assert spec.origin == str(here.folder / "some.zip" / f"{TWO}.py")
    other = importlib.import_module(ONE)
    assert not here.said
    importlib.import_module(TWO)
    assert here.said == ["whole"]
    assert "exec_module" not in vars(other.__loader__)


def test_a_bare_folder_of_that_name_is_not_it(here: Here) -> None:
    """Such as a checkout's, beside the script."""
    here.wait()
    (here.folder / ONE).mkdir()
    importlib.import_module(ONE)
    assert not here.said
    del sys.modules[ONE]
    here.module(name=f"{ONE}/__init__")
    importlib.invalidate_caches()
    importlib.import_module(ONE)
    assert here.said == ["whole"]


@pytest.mark.parametrize("first", [True, False])
def test_beside_other_finders(here: Here, first: bool) -> None:
    """One asks Python, and hands on what it got; one is of Python 3.3."""
    under_way: list[str] = []

    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name not in NAMES or under_way:
            return None
        under_way.append(name)
        return importlib.util.find_spec(name)

    here.module()
    of_old = types.SimpleNamespace(find_module=lambda name, path=None: None)
    if not first:
        here.wait()
    sys.meta_path[:0] = [of_old, types.SimpleNamespace(find_spec=find_spec)]
    if first:
        here.wait()
    importlib.import_module(ONE)
    assert (under_way, here.said) == ([ONE], ["whole"])


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
    assert environment.prints("-c", WRAPT, order) == ""
