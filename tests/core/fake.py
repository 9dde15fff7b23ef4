"""Fake DeepSpeed installations and sample patch folders, written as files."""

import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import ds_patches
from tests.shell import REPOSITORY, python

#: A small DeepSpeed: targets of every kind, and what the patch only relies on.
ENGINE = '''
class Relied:
    limit = 3


def scale(x):
    """Module level function."""
    return ("scale", x)


class Engine:
    factor = 2

    def forward(self, x):
        return ("forward", self.factor, x)

    @classmethod
    def build(cls, x):
        return ("build", cls.__name__, x)

    def norm(self, x):
        return ("norm", x)


class DeepSpeedEngine:
    def __init__(self):
        pass


class Pipeline(Engine):
    pass
'''

MODULE = "deepspeed.runtime.engine"
#: What the sample touches.
PLACES = ("scale", "Engine.forward", "Engine.build", "Engine.norm", "Relied")
#: Those that are recorded.
RELEASES = "0.16.0 0.16.5 0.17.0 0.17.2 0.18.9 0.19.0 0.19.3 0.19.7 0.19.8"

#: The sample patch: every kind of target, and a name that upstream lacks.
BINDING = """
from ds_patches.core.patch import Dependency, Link, Patch, Target

MODULE = "deepspeed.runtime.engine"
HERE = "ds_patches.sample.around"

PATCH = Patch(
    name="sample",
    summary="Marks what the fake engine returns",
    upstream=(Link("#1", "https://example.org/1"),),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        Target(MODULE, "scale", HERE + ":mark"),
        Target(MODULE, "Engine.forward", HERE + ":mark"),
        Target(MODULE, "Engine.norm", HERE + ":mark"),
        Target(MODULE, "Engine.later", HERE + ":mark", releases=">=0.20"),
    ),
    dependencies=(
        Dependency(MODULE, "Relied", "its limit"),
        Dependency(MODULE, "Engine.build", "makes one"),
    ),
    activate=HERE + ":activate",
    deactivate=HERE + ":deactivate",
)
"""

AROUND = """
log = []


def mark(wrapped, instance, args, kwargs):
    return ("marked", wrapped(*args, **kwargs))


def activate():
    log.append("activate")
    return ["engines built before keep their hooks"]


def deactivate():
    log.append("deactivate")
"""


def depth(qualname: str = "scale") -> int:
    """Call a target of the sample patch; return how many patches have marked the result."""
    engine = import_module(MODULE)
    kind, _, name = qualname.rpartition(".")
    return repr(getattr(engine.Pipeline() if kind else engine, name)(1)).count("marked")


def states(*names: str) -> list[str]:
    return [ds_patches.status()[name].state.value for name in names]


def edited(text: str, old: str, new: str) -> str:
    """`text` with `new` for every `old`; AssertionError if there is none, so nothing to test."""
    assert old in text, f"not in the text that is edited: {old!r}"
    return text.replace(old, new)


def edit(path: Path, old: str, new: str) -> None:
    """Put `new` for every `old` into a file."""
    path.write_text(edited(path.read_text("utf-8"), old, new), encoding="utf-8")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def deepspeed(folder: Path, version: str | None = "0.19.8", engine: str = ENGINE) -> Path:
    """Write a DeepSpeed of this version, with its metadata unless version is None."""
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "deepspeed/__init__.py", "from .runtime import engine\n")
    write(folder / "deepspeed/runtime/__init__.py", "")
    write(folder / "deepspeed/runtime/engine.py", engine)
    if version is not None:
        metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
        write(folder / f"deepspeed-{version}.dist-info/METADATA", metadata)
    return folder


def patch_folder(folder: Path, name: str = "sample", shapes_of: str = ENGINE) -> Path:
    """Write a patch folder, and a record in which every release has this engine source."""
    write(folder / name / "__init__.py", '"""A sample."""\n')
    write(folder / name / "binding.py", edited(BINDING, "sample", name))
    write(folder / name / "around.py", AROUND)
    record(folder, {shapes_of: "0.16.0-0.19.8"})
    return folder


def record(folder: Path, engines: Mapping[str, str]) -> None:
    """Record the sample's places: by engine source, the releases that have it, as spans."""
    from ds_patches.core import definitions

    hashes, places = {}, {name: {} for name in PLACES}
    for engine, spans in engines.items():
        file = write(folder / "recorded.py", engine)
        hashes[sha256(file.read_bytes()).hexdigest()[:16]] = spans
        for name, shapes in places.items():
            node = definitions.by_name(definitions.tree(file).body, name)
            digest = definitions.digest(node) if node else "absent"
            shapes[digest] = ", ".join(filter(None, [shapes.get(digest), spans]))
    known = {"releases": RELEASES, "files": {MODULE: hashes}, "places": {MODULE: places}}
    write(folder / "shapes.json", json.dumps(known))


def run(
    code: str,
    *path: Path,
    arguments: tuple[str, ...] = (),
    bare: bool = False,
    status: int | None = 0,
    **variables: str,
) -> Any:
    """Run code in a fresh interpreter with these folders before all others on its path.

    bare: without site-packages; `path` has to bring everything.
    status: which it has to exit with; None: any.
    """
    folders = [*map(str, path), str(REPOSITORY), "" if bare else os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, folders))} | variables
    words = (*(("-S",) if bare else ()), *(arguments or ("-c", textwrap.dedent(code))))
    done = python(*words, variables=variables, timeout=300)
    assert status in (None, done.returncode), done.stderr + done.stdout
    return done


class Place:
    """Patches that are alike, by their names, and a DeepSpeed for programs there."""

    def __init__(self, root: Path, *names: str) -> None:
        self.root, self.patches, self.deepspeed = root, root / "patches", root / "deepspeed"
        self.path = [self.deepspeed]
        for name in names:
            patch_folder(self.patches, name)
        deepspeed(self.deepspeed)

    def edit(self, file: str, old: str, new: str) -> None:
        """Edit a file of a patch: "sample/binding.py"."""
        edit(self.patches / file, old, new)

    def run(self, code: str, **variables: Any) -> Any:
        """Run a program that has the patches, and pytest."""
        begin = f"import pytest, sys\n{with_patches(self.patches)}"
        return run(begin + textwrap.dedent(code), *self.path, **variables)

    def command(self, *words: str, status: int | None = 0, **more: Any) -> Any:
        """Run the command line."""
        code = f"from ds_patches.__main__ import main; raise SystemExit(main({words!r}))"
        return run(with_patches(self.patches) + code, *self.path, status=status, **more)


def with_patches(folder: Path) -> str:
    """Return the line of code that adds a folder of patches to the package, with its record."""
    add = f"fake.add_patches({str(folder)!r})"
    return f"import ds_patches; from tests.core import fake; {add}\n"


def add_patches(folder: str) -> None:
    """Add them to the package of this process."""
    from ds_patches import cures
    from ds_patches.core import shape

    ds_patches.__path__.append(folder)
    cures.__path__.append(f"{folder}/cures")
    shape.RECORD = Path(folder, "shapes.json")


def dependencies(folder: Path) -> Path:
    """Link the two dependencies alone into a folder, for an interpreter without site-packages."""
    folder.mkdir()
    for name in ("packaging", "wrapt"):
        (folder / name).symlink_to(Path(str(import_module(name).__file__)).parent)
    return folder
