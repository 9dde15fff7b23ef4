"""A throw-away environment with ds_patches, one sample patch and a fake DeepSpeed installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import ds_patches
from tests.core import fake

#: Prints the state of the sample patch before and after the import it waits for.
BEFORE_AND_AFTER = """
import ds_patches
state = lambda: ds_patches.status()["sample"].state.value
before = state()
import deepspeed
print(before, state(), sep=", ")
"""
LIVE, NOT_LIVE = "pending, applied\n", "ready, ready\n"

Done = subprocess.CompletedProcess[str]


class Environment:
    """A venv without pip; interpreters of it know nothing of the one that runs the tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "bin/python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = root / "lib" / version / "site-packages"
        self.package = self.site / "ds_patches"
        self.hook = self.package / "startup/hook"

    @classmethod
    def make(cls, root: Path) -> Environment:
        venv.create(root, symlinks=True)
        made = cls(root)
        ours = Path(ds_patches.__file__).parent
        shutil.copytree(ours, made.package, ignore=shutil.ignore_patterns("__pycache__"))
        for binding in made.package.glob("*/binding.py"):  # DS_PATCHES=all is the sample alone
            shutil.rmtree(binding.parent)
        for cure in (made.package / "cures").glob("[a-z]*.py"):
            cure.unlink()
        made.add_patch("sample")
        for part in (fake.deepspeed(root / "deepspeed"), fake.dependencies(root / "libraries")):
            shutil.copytree(part, made.site, symlinks=True, dirs_exist_ok=True)
        # So that Python itself reads such a file at every start, also where ours is not enabled.
        fake.write(made.site / "another.pth", "# of another package\n")
        return made

    def add_patch(self, name: str) -> None:
        patches = fake.patch_folder(self.root / "patches", name)
        shutil.copytree(patches / name, self.package / name)
        shutil.copy(patches / "shapes.json", self.package / "core")

    def copy(self, root: Path) -> Environment:
        shutil.copytree(self.root, root, symlinks=True)
        return Environment(root)

    def execute(self, *words: str | Path, path: tuple[Path, ...] = (), **more: Any) -> Done:
        """Run a command with these folders as its PYTHONPATH, and these variables; or in `cwd`."""
        cwd = more.pop("cwd", self.root)
        whole = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "timeout": 60}
        return subprocess.run([*map(str, words)], env=variables(*path) | more, cwd=cwd, **whole)

    def start(self, *arguments: str | Path, **more: Any) -> Done:
        return self.execute(self.python, *arguments, **more)

    def prints(self, *arguments: str | Path, **more: Any) -> str:
        done = self.start(*arguments, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ds_patches(self, *arguments: str | Path, **more: Any) -> Done:
        return self.start("-m", "ds_patches", *arguments, **more)

    def doctor(self, *options: str, **more: Any) -> str:
        said = self.start(*options, "-m", "ds_patches", "doctor", **more).stdout
        return said.partition("\nstart-up\n")[2]

    def refuses(self, *arguments: str | Path, **more: Any) -> str:
        """Run the command line, which has to fail with one line; return that."""
        done = self.ds_patches(*arguments, **more)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        return done.stderr


def variables(*path: Path) -> dict[str, str]:
    """A shell's variables with this PYTHONPATH; nothing else of Python's or of ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DS_PATCHES", "PYTHON"))}
    return clean | ({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {})
