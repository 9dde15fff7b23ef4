"""The digest: equal where behaviour is equal, on every Python, from source and live object."""

import ast
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.version import Version

from ds_patches.core import definitions, registry, release, shape
from ds_patches.core.patch import Place
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
    ("old", "new", "same"),
    [
        ('"A docstring."', '"""Another."""', True),
        ('    "A docstring."\n', "", True),
        ("is {x!r:>4} here", "was {x!r:>4}", True),
        ("f(x: int, *, y=1):", "f(x: int, *, y=1):  # a comment", True),
        ('{"a": None, **x}', "{\n        'a': None, **x}", True),
        ("@decorated\n", "", False),
        ("@decorated", "@other", False),
        ("y=1", "y=2", False),
        ("y=1", "z=1", False),
        ("x: int", "x: float", False),
        ("x: int, *", "x: int", False),
        ("def f", "async def f", False),
        ("{x!r:>4}", "{y!r:>4}", False),
        ("{x!r:>4}", "{x!s:>4}", False),
        ('"a": None', '"b": None', False),
        ('"a": None', '"a": 0', False),
        ('"a": None, **x', '**x, "a": None', False),
        ("is None", "is not None", False),
    ],
)
def test_behaviour_is_shape_and_words_and_layout_are_not(old: str, new: str, same: bool) -> None:
    """Methods, here."""
    before, after = (
        f"class C:\n{textwrap.indent(text, '    ')}" for text in (BASE, fake.edited(BASE, old, new))
    )
    assert (digest(after) == digest(before)) is same


def test_the_last_definition_wins(tmp_path: Path) -> None:
    text = "try:\n    import x\n    def f(): return 1\nexcept ImportError:\n    def f(): return 2\n"
    fake.write(tmp_path / "deepspeed/m.py", text)

    def found(qualname: str) -> str:
        return shape.of_source(Place("deepspeed.m", qualname), tmp_path / "deepspeed")

    assert found("f") == digest("def f(): return 2")
    assert found("f.absent") == found("absent.p") == shape.ABSENT


EVERY_DIGEST = """
import ast, hashlib, sys
from pathlib import Path
from ds_patches.core import definitions
lines = []
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            lines.append(f"{path}:{node.lineno} {definitions.digest(node)}")
print(len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def digest_by(python: str) -> str:
    """Return the digest of digests."""
    words = [python, "-W", "ignore", "-c", EVERY_DIGEST, release.installed().folder / "runtime"]
    clean = shell.environment(PYTHONPATH=str(shell.REPOSITORY))
    return subprocess.check_output(words, env=clean, text=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_gives_the_same_digests(version: str) -> None:
    """Over every function and class of the installed DeepSpeed, against the running Python."""
    other = shutil.which(f"python{version}")
    if not other or subprocess.run([other, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python {version} on the path")
    theirs = digest_by(other)
    assert int(theirs.split()[0]) > 1000
    assert theirs == digest_by(sys.executable)


#: Prints the shapes of each patch's places: by the record, parsed, and live after their import.
EVERY_SHAPE = """
import importlib, json
from ds_patches.core import definitions, gate, registry, release, shape
tree, definitions.tree = definitions.tree, None  # no file of a recorded release is parsed
verdicts = {name: gate.check(patch).state.value for name, patch in registry.patches().items()}
assert "refused" not in verdicts.values(), verdicts
definitions.tree = tree
installed = release.installed()
places = {
    name: gate.places(registry.patch(name), installed.version)
    for name, state in verdicts.items() if state != "out of range"
}
def shapes(look):
    return {n: {p.key: look(p, installed.folder) for p in places[n]} for n in places}
before = shapes(shape.of_source)
for name in places:
    for place in places[name]:
        if before[name][place.key] != shape.ABSENT:
            importlib.import_module(place.module)
print("shapes", json.dumps([before, shapes(shape.parsed), shapes(shape.of)]))
"""


@pytest.mark.core_case
def test_record_source_and_live_object_agree() -> None:
    """DRIFT: fails, naming the place, when the installed DeepSpeed is not what was recorded."""
    (line,) = (x for x in fake.run(EVERY_SHAPE).stdout.splitlines() if x.startswith("shapes "))
    by_record, source, live = json.loads(line.removeprefix("shapes "))
    assert source
    assert by_record == source == live
    for name, shapes in source.items():
        assert shapes
        for place, digest in shapes.items():
            known = shape.known(Place(*place.split(":")))
            assert digest in known, f"DRIFT: {name} relies on {place}, found {digest}"


def test_what_is_recorded_is_claimed() -> None:
    patches = registry.patches().values()
    claimed = {place.key for p in patches for place in (*p.targets, *p.dependencies)}
    record = shape.recorded()
    assert {f"{module}:{name}" for module, of in record.places.items() for name in of} == claimed
    assert record.files.keys() == record.places.keys()


def test_no_patch_claims_a_release_that_nobody_has_looked_at() -> None:
    recorded = shape.recorded().releases
    for patch in registry.patches().values():
        for end in (f"{recorded[0]}.dev0", f"{recorded[-1]}.post1"):
            assert not release.covers(patch.supported, Version(end)), patch.name
