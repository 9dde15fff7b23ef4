"""A hook that is of no use to its interpreter: one clear line, and the program runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.core import fake
from tests.startup.environment import Environment

WANTED = {"DS_PATCHES": "all"}
STRICT = {**WANTED, "DS_PATCHES_STRICT": "1"}


def of_another_copy(here: Environment) -> str:
    """Leave a hook of this kind in `other`; return what is to be said of it."""
    shutil.copytree(here.package, here.root / "other/ds_patches")
    return f"it belongs to {here.root / 'other/ds_patches'}, and this Python has {here.package}"


def of_nothing(here: Environment) -> str:
    shutil.move(here.package, here.root / "other/ds_patches")
    return "No module named 'ds_patches'"


def of_a_bare_folder(here: Environment) -> str:
    of_nothing(here)
    here.package.mkdir()
    return f"and this Python has {here.package}"


def of_another_version(here: Environment) -> str:
    (here.root / "other").mkdir()
    (here.root / "other/ds_patches").symlink_to(here.package)
    (here.package / "startup/__init__.py").write_text("")
    return "cannot import name 'arm'"


KINDS = [of_another_copy, of_nothing, of_a_bare_folder, of_another_version]


@pytest.mark.parametrize(
    ("enabled", "stale"), [*((False, stale) for stale in KINDS), (True, of_another_version)]
)
def test_one_line_says_which_file_and_why(
    own: Environment, enabled: bool, stale: Callable[[Environment], str]
) -> None:
    """Also in a daemon: its stderr is closed, where an exception would end the interpreter."""
    hook = own.root / "other/ds_patches/startup/hook"
    mine = fake.write(own.root / "mine/sitecustomize.py", "answer = 42").parent
    path = (mine,) if enabled else (hook, mine)
    if enabled:
        assert own.ds_patches("enable").returncode == 0
    reason = stale(own)
    code = "import sitecustomize; print(sitecustomize.answer)"
    unset = own.start("-c", code, path=path)
    assert (unset.returncode, unset.stdout, unset.stderr) == (0, "42\n", "")
    closed = ("sh", "-c", '"$0" -c "$1" 2>&-', own.python, code)
    for flags, ends in ((WANTED, (0, "42\n")), (STRICT, (1, ""))):
        done = own.start("-c", code, path=path, **flags)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (*ends, 1)
        assert done.stderr.startswith("ds_patches: nothing is patched: ")
        assert str(own.site / "ds_patches.pth" if enabled else hook) in done.stderr
        assert reason in done.stderr
        done = own.execute(*closed, path=path, **flags)
        assert (done.returncode, done.stdout) == ends


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
