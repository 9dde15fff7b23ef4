"""`enable` and `disable`: one file in site-packages; and a hook of no use to its interpreter."""

import shutil
from pathlib import Path

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment

WANTED = {"DS_PATCHES": "all"}
STRICT = {**WANTED, "DS_PATCHES_STRICT": "1"}


def listing(folder: Path) -> list[str]:
    """All that lies under a folder, but for what importing leaves."""
    return sorted(str(one) for one in folder.rglob("*") if "__pycache__" not in one.parts)


def test_enabling_and_disabling_are_idempotent_and_leave_nothing(own: Environment) -> None:
    before = listing(own.root)
    file = own.site / "ds_patches.pth"
    assert own.ds_patches("disable").returncode == 0
    first, second = own.ds_patches("enable"), own.ds_patches("enable")
    assert str(file) in first.stdout == second.stdout
    assert listing(own.root) == sorted([*before, str(file)])
    assert file.read_text().count("\n") == 1, "Python runs lines that begin with import, each alone"
    file.write_text("import of_an_older_version")
    own.ds_patches("enable")
    assert own.prints("-c", BEFORE_AND_AFTER, DS_PATCHES="sample") == LIVE
    for _ in range(2):
        assert own.ds_patches("disable").returncode == 0
    assert listing(own.root) == before


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_where_nothing_can_be_written(own: Environment, command: str) -> None:
    """Not by root either: another thing has the file's name."""
    (own.site / "ds_patches.pth/some").mkdir(parents=True)
    assert f"{own.site / 'ds_patches.pth'} cannot be " in own.refuses(command)


def of_another_copy(here: Environment) -> str:
    """Leave a hook of this kind in `other`; return what is to be said of it."""
    shutil.copytree(here.package, here.root / "other/ds_patches")
    return f"it belongs to {here.root / 'other/ds_patches'}, and this Python has {here.package}"


def of_nothing(here: Environment) -> str:
    shutil.move(here.package, here.root / "other/ds_patches")
    return "No module named 'ds_patches'"


def of_another_version(here: Environment) -> str:
    (here.root / "other").mkdir()
    (here.root / "other/ds_patches").symlink_to(here.package)
    (here.package / "startup/__init__.py").write_text("")
    return "cannot import name 'arm'"


@pytest.mark.parametrize(
    ("enabled", "stale"),
    [(False, of_another_copy), (False, of_nothing), (True, of_another_version)],
)
def test_one_line_says_which_file_and_why(own: Environment, enabled: bool, stale: object) -> None:
    """Also in a daemon: its stderr is closed, where an exception would end the interpreter."""
    hook = own.root / "other/ds_patches/startup/hook"
    mine = fake.write(own.root / "mine/sitecustomize.py", "answer = 42").parent
    path = (mine,) if enabled else (hook, mine)
    if enabled:
        assert own.ds_patches("enable").returncode == 0
    reason = stale(own)  # type: ignore[operator]
    code = "import sitecustomize; print(sitecustomize.answer)"
    unset = own.start("-c", code, path=path)
    assert (unset.returncode, unset.stdout, unset.stderr) == (0, "42\n", "")
    closed = ("sh", "-c", '"$0" -c "$1" 2>&-', own.python, code)
    for flags, ends in ((WANTED, (0, "42\n")), (STRICT, (1, ""))):
        done = own.start("-c", code, path=path, **flags)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (*ends, 1)
        assert str(own.site / "ds_patches.pth" if enabled else hook) in done.stderr
        assert reason in done.stderr
        done = own.execute(*closed, path=path, **flags)
        assert (done.returncode, done.stdout) == ends


def test_in_site_packages_it_is_silent_once_the_package_is_gone(own: Environment) -> None:
    """The `.pth` file outlives an uninstalled package: nothing of pip's removes it."""
    assert own.ds_patches("enable").returncode == 0
    of_nothing(own)
    own.package.mkdir()  # as pip leaves it, with what was compiled
    done = own.start("-c", "print(42)", **STRICT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
