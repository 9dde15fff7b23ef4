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
LIVE, NOT_LIVE = "ready, applied\n", "ready, ready\n"
WANTED = {"DS_PATCHES": "sample"}
STRICT = {**WANTED, "DS_PATCHES_STRICT": "1"}

#: The files of the hook that lie in site-packages, and what they are copies of.
INSTALLED = {"ds_patches.pth": "ds_patches.pth", "_ds_patches_hook.py": "sitecustomize.py"}


class Environment:
    """A venv without pip; interpreters of it know nothing of the one that runs the tests.

    It has the package alone, as on a path, until `install` adds what else a wheel has.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.python = root, root / "bin/python"
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
        patches = fake.patch_folder(root / "patches")
        shutil.copytree(patches / "sample", made.package / "sample")
        shutil.copy(patches / "shapes.json", made.package / "core")
        for part in (fake.deepspeed(root / "deepspeed"), fake.dependencies(root / "libraries")):
            shutil.copytree(part, made.site, symlinks=True, dirs_exist_ok=True)
        # So that Python itself reads such a file at every start, also where ours is not there.
        fake.write(made.site / "another.pth", "# of another package\n")
        return made

    def install(self) -> Environment:
        for name, source in INSTALLED.items():
            shutil.copy(self.hook / source, self.site / name)
        return self

    def copy(self, root: Path) -> Environment:
        shutil.copytree(self.root, root, symlinks=True)
        return Environment(root)

    def execute(
        self, *words: str | Path, path: tuple[Path, ...] = (), status: int = 0, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with these folders as its PYTHONPATH, and these variables; or in `cwd`.

        status: which it has to exit with.
        """
        cwd = more.pop("cwd", self.root)
        whole = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "timeout": 60}
        done = subprocess.run([*map(str, words)], env=variables(*path) | more, cwd=cwd, **whole)
        assert done.returncode == status, done.stderr + done.stdout
        return done

    def start(self, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.execute(self.python, *arguments, **more)

    def run(self, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command by `ds-patches run`."""
        return self.start("-m", "ds_patches", "run", *words, **more)

    def refuses(self, *words: str | Path, **more: Any) -> str:
        """Run a command by `ds-patches run`, which has to fail with one line; return that."""
        done = self.run(*words, status=2, **more)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
        return done.stderr

    def doctor(self, *options: str, **more: Any) -> str:
        """Return what doctor says of the start-up hook."""
        printed = self.start(*options, "-m", "ds_patches", "doctor", **more).stdout
        return printed.partition("\nstart-up\n")[2]


def variables(*path: Path) -> dict[str, str]:
    """A shell's variables with this PYTHONPATH; nothing else of Python's or of ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DS_PATCHES", "PYTHON"))}
    return clean | ({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {})
