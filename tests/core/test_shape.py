"""The digest: equal where behaviour is equal, on every Python, from source and live object."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ds_patches
from ds_patches.core import definitions, gate, registry, release, shape
from ds_patches.core.state import State
from tests import shell
from tests.core import fake

BASE = """
@decorated
def f(x: int, *, y=1):
    "A docstring."
    if x is None:
        raise ValueError(f"x is {x!r:>4} here")
    return {"a": None, **x}
"""


def digest(source: str) -> str:
    return definitions.digest(ast.parse(source).body[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"A docstring."', '"""Another."""'),
        ('    "A docstring."\n', ""),
        ("is {x!r:>4} here", "was {x!r:>4}"),
        ("f(x: int, *, y=1):", "f(x: int, *, y=1):  # a comment"),
        ('{"a": None, **x}', "{\n        'a': None, **x}"),
    ],
)
def test_words_and_layout_are_not_shape(old: str, new: str) -> None:
    assert digest(fake.edited(BASE, old, new)) == digest(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@decorated\n", ""),
        ("@decorated", "@other"),
        ("y=1", "y=2"),
        ("y=1", "z=1"),
        ("x: int", "x: float"),
        ("x: int, *", "x: int"),
        ("def f", "async def f"),
        ("{x!r:>4}", "{y!r:>4}"),
        ("{x!r:>4}", "{x!s:>4}"),
        ('"a": None', '"b": None'),
        ('"a": None', '"a": 0'),
        ('"a": None, **x', '**x, "a": None'),
        ("is None", "is not None"),
    ],
)
def test_behaviour_is_shape(old: str, new: str) -> None:
    assert digest(fake.edited(BASE, old, new)) != digest(BASE)


def test_a_class_includes_its_methods() -> None:
    source = "class C:\n    '''Doc.'''\n    def f(self):\n        '''Doc.'''\n        return 1\n"
    assert digest(source) == digest(fake.edited(source, "Doc.", "Other."))
    assert digest(source) != digest(fake.edited(source, "return 1", "return 2"))


def test_a_property_is_its_getter_and_the_last_definition_wins(tmp_path: Path) -> None:
    getter = "    @property\n    def p(self):\n        return 1\n"
    setter = "    @p.setter\n    def p(self, v):\n        pass\n"
    text = f"class C:\n{getter}{setter}\ntry:\n    import x\n    def f(): return 1\n"
    text += "except ImportError:\n    def f(): return 2\n"
    fake.write(tmp_path / "deepspeed/m.py", text)

    def found(qualname: str) -> str:
        return shape.of_source(shape.Place("deepspeed.m", qualname), tmp_path / "deepspeed")

    assert found("C.p") == digest("@property\ndef p(self):\n    return 1\n")
    assert found("f") == digest("def f(): return 2")
    assert found("C.absent") == found("absent.p") == shape.ABSENT


EVERY_DIGEST = """
import ast, hashlib, sys
from functools import cache
from pathlib import Path
from ds_patches.core import definitions
lines = []
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            lines.append(f"{path}:{node.lineno} {definitions.digest(node)}")
print(len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def interpreter(version: str) -> str | None:
    """Return a Python of this version that starts, from the path or from pyenv."""
    pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True).returncode:
            return candidate
    return None


@cache
def digest_by(python: str) -> str:
    """The digest of digests."""
    words = [python, "-W", "ignore", "-c", EVERY_DIGEST, release.installed().folder / "runtime"]
    clean = shell.environment(PYTHONPATH=str(shell.REPOSITORY))
    return subprocess.run(words, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_gives_the_same_digests(version: str) -> None:
    """Over every function and class of the installed DeepSpeed, against the running Python."""
    other = interpreter(version)
    if other is None:
        pytest.skip(f"no Python {version} on this machine")
    theirs = digest_by(other)
    assert int(theirs.split()[0]) > 1000
    assert theirs == digest_by(sys.executable)


Digests = dict[str, str]


def no_business(name: str) -> str:
    """Why a patch is not for the installed release; "" if it is."""
    verdict = gate.check(registry.patch(name))
    absent = verdict.state in (State.OUT_OF_RANGE, State.FIXED_UPSTREAM)
    return f"{name} has no business here: {verdict.reason}" if absent else ""


@pytest.fixture(scope="module")
def digests() -> tuple[dict[str, Digests], dict[str, Digests]]:
    """Of each patch's places: from the sources, and live after one import of all of them."""
    code = f"""
        import importlib, json
        from ds_patches.core import definitions, gate, registry, release, shape
        installed, places = release.installed(), {{}}
        for name in {[name for name in ds_patches.names() if not no_business(name)]}:
            of = registry.patch(name), installed.version
            places[name] = gate.places(*of)
        def digests(look):
            return {{n: {{p.key: look(p, installed.folder) for p in places[n]}} for n in places}}
        before = digests(shape.of_source)
        for name in places:
            for place in places[name]:
                if before[name][place.key] != shape.ABSENT:
                    importlib.import_module(place.module)
        print("digests", json.dumps([before, digests(shape.of)]))
    """
    (line,) = (x for x in fake.output(code).splitlines() if x.startswith("digests "))
    source, live = json.loads(line.removeprefix("digests "))
    return source, live


@pytest.mark.core_case
@pytest.mark.parametrize("name", ds_patches.names())
def test_source_and_live_object_agree_and_are_known(
    digests: tuple[dict[str, Digests], dict[str, Digests]], name: str
) -> None:
    """DRIFT: fails, naming the place, when the installed DeepSpeed is not what was recorded."""
    if reason := no_business(name):
        pytest.skip(reason)
    source, live = (found[name] for found in digests)
    assert source
    assert source == live
    known = shape.known(registry.patch(name))
    for place, found in source.items():
        assert found in known.get(place, {}), f"DRIFT: {name} relies on {place}, found {found}"


@pytest.mark.parametrize("name", ds_patches.names())
def test_every_recorded_place_is_claimed(name: str) -> None:
    patch = registry.patch(name)
    assert set(shape.known(patch)) == {place.key for place in (*patch.targets, *patch.dependencies)}
