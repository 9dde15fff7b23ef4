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

def state():
    return ds_patches.status()["sample"].state.value

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
        """Install everything into a new venv at `root`."""
        venv.create(root, symlinks=True)
        made = cls(root)
        ours = Path(ds_patches.__file__).parent
        shutil.copytree(ours, made.package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ds_patches.names():  # DS_PATCHES=all is then the sample alone
            shutil.rmtree(made.package / name)
        made.add_patch("sample")
        for part in (fake.deepspeed(root / "deepspeed"), fake.dependencies(root / "libraries")):
            shutil.copytree(part, made.site, symlinks=True, dirs_exist_ok=True)
        # So that Python itself reads such a file at every start, also where ours is not enabled.
        fake.write(made.site / "another.pth", "# of another package\n")
        return made

    def add_patch(self, name: str) -> None:
        """Install another one like the sample."""
        patch = fake.patch_folder(self.root / "patches", name) / name
        shutil.copytree(patch, self.package / name)

    def copy(self, root: Path) -> Environment:
        """Return another environment like this one."""
        shutil.copytree(self.root, root, symlinks=True)
        return Environment(root)

    def execute(
        self,
        *words: str | Path,
        path: tuple[Path, ...] = (),
        cwd: Path | None = None,
        **variables: str,
    ) -> Done:
        """Run a command with these folders as its PYTHONPATH, and these variables."""
        return subprocess.run(
            [str(word) for word in words],
            env=self.variables(*path) | variables,
            cwd=cwd or self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def variables(self, *path: Path) -> dict[str, str]:
        """Return a shell's variables with this PYTHONPATH; nothing else of Python's or of ours."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DS_PATCHES", "PYTHON"))}
        return clean | ({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {})

    def start(self, *arguments: str | Path, **more: Any) -> Done:
        """Run an interpreter of this environment."""
        return self.execute(self.python, *arguments, **more)

    def ds_patches(self, *arguments: str | Path, **more: Any) -> Done:
        """Run the command line."""
        return self.start("-m", "ds_patches", *arguments, **more)

    def refuses(self, *arguments: str | Path, **more: Any) -> str:
        """Run the command line, which has to fail with one line; return that."""
        done = self.ds_patches(*arguments, **more)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("ds_patches: ")
        return done.stderr
