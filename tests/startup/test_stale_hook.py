"""A hook that is of no use to its interpreter: one clear line, and the program runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.core import fake
from tests.startup.environment import Environment

WANTED = {"DS_PATCHES": "all"}
STRICT = {"DS_PATCHES": "all", "DS_PATCHES_STRICT": "1"}


def of_another_copy(here: Environment) -> str:
    """Leave a hook of this kind in `other`; return what is to be said of it."""
    shutil.copytree(here.package, here.root / "other/ds_patches")
    return f"it belongs to {here.root / 'other/ds_patches'}, and this Python has {here.package}"


def of_nothing(here: Environment) -> str:
    shutil.move(here.package, here.root / "other/ds_patches")
    return "No module named 'ds_patches'"


def of_a_bare_folder(here: Environment) -> str:
    shutil.move(here.package, here.root / "other/ds_patches")
    here.package.mkdir()
    return f"and this Python has {here.package}"


def of_another_version(here: Environment) -> str:
    (here.root / "other").mkdir()
    (here.root / "other/ds_patches").symlink_to(here.package)
    (here.package / "startup/__init__.py").write_text("")
    return "cannot import name 'arm'"


@pytest.mark.parametrize(
    "stale", [of_another_copy, of_nothing, of_a_bare_folder, of_another_version]
)
def test_on_the_path(own: Environment, stale: Callable[[Environment], str]) -> None:
    reason = stale(own)
    hook = own.root / "other/ds_patches/startup/hook"
    path = (hook, fake.write(own.root / "mine/sitecustomize.py", "answer = 42").parent)
    code = "import sitecustomize; print(sitecustomize.answer)"
    unset = own.start("-c", code, path=path)
    assert (unset.returncode, unset.stdout, unset.stderr) == (0, "42\n", "")
    done = own.start("-c", code, path=path, **WANTED)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "42\n", 1)
    line = f"ds_patches: nothing is patched: the start-up hook on PYTHONPATH, {hook}, "
    assert done.stderr.startswith(line)
    assert reason in done.stderr
    strict = own.start("-c", code, path=path, **STRICT)
    assert (strict.returncode, strict.stdout, strict.stderr) == (1, "", done.stderr)


@pytest.mark.parametrize("gone", [of_nothing, of_a_bare_folder])
def test_in_site_packages_it_is_silent_once_the_package_is_gone(
    own: Environment, gone: Callable[[Environment], str]
) -> None:
    """The `.pth` file outlives an uninstalled package: nothing of pip's removes it."""
    assert own.ds_patches("enable").returncode == 0
    gone(own)
    for variables in ({}, WANTED, STRICT):
        done = own.start("-c", "print(42)", **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_in_site_packages_of_another_version(own: Environment) -> None:
    assert own.ds_patches("enable").returncode == 0
    of_another_version(own)
    unset = own.start("-c", "print(42)")
    assert (unset.returncode, unset.stdout, unset.stderr) == (0, "42\n", "")
    done = own.start("-c", "print(42)", **WANTED)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "42\n", 1)
    file = own.site / "ds_patches.pth"
    for part in ("ds_patches: nothing is patched: ", str(file), "cannot import", "remove that"):
        assert part in done.stderr
    strict = own.start("-c", "print(42)", **STRICT)
    assert (strict.returncode, strict.stdout, strict.stderr) == (1, "", done.stderr)


@pytest.mark.parametrize("kind", ["PYTHONPATH", ".pth"])
def test_in_a_daemon(own: Environment, kind: str) -> None:
    """Its stderr is closed, where an exception of the hook would end the interpreter."""
    assert own.ds_patches("enable" if kind == ".pth" else "disable").returncode == 0
    (of_another_version if kind == ".pth" else of_nothing)(own)
    path = () if kind == ".pth" else (own.root / "other/ds_patches/startup/hook",)
    shell = ("sh", "-c", '"$0" -c "print(42)" 2>&-', own.python)
    done = own.execute(*shell, path=path, **WANTED)
    assert (done.returncode, done.stdout) == (0, "42\n")
    strict = own.execute(*shell, path=path, **STRICT)
    assert (strict.returncode, strict.stdout) == (1, "")
