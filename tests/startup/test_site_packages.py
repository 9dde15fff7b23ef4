"""`enable` and `disable`: one file in site-packages, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, NOT_LIVE, Environment


def listing(folder: Path) -> list[str]:
    """Return all that lies under a folder, but for what importing leaves."""
    return sorted(str(one) for one in folder.rglob("*") if "__pycache__" not in one.parts)


def test_enabling_and_disabling_are_idempotent_and_leave_nothing(own: Environment) -> None:
    before = listing(own.root)
    file = own.site / "ds_patches.pth"
    assert own.ds_patches("disable").stdout == "ds_patches: was not enabled\n"
    first, second = own.ds_patches("enable"), own.ds_patches("enable")
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    assert f"enabled by {file}" in first.stdout
    assert listing(own.root) == sorted([*before, str(file)])
    assert file.read_text().count("\n") == 1, "Python runs lines that begin with import, each alone"
    assert own.ds_patches("disable").stdout == f"ds_patches: removed {file}\n"
    assert own.ds_patches("disable").returncode == 0
    assert listing(own.root) == before


@pytest.mark.parametrize(
    ("option", "expected"), [("-I", LIVE), ("-E", LIVE), ("-s", LIVE), ("-S", NOT_LIVE)]
)
def test_options_of_python(enabled: Environment, option: str, expected: str) -> None:
    path = (enabled.site,) if option == "-S" else ()  # which has the modules of the program
    done = enabled.start(option, "-c", BEFORE_AND_AFTER, path=path, DS_PATCHES="sample")
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_enabled_again_after_an_upgrade(own: Environment) -> None:
    file = fake.write(own.site / "ds_patches.pth", "import of_an_older_version")
    assert own.ds_patches("enable").returncode == 0
    assert "older" not in file.read_text()
    assert own.start("-c", BEFORE_AND_AFTER, DS_PATCHES="sample").stdout == LIVE


@pytest.mark.parametrize(
    ("command", "folder"), [("enable", "missing"), ("enable", "full"), ("disable", "full")]
)
def test_where_nothing_can_be_written(
    environment: Environment, tmp_path: Path, command: str, folder: str
) -> None:
    """Not by root either: there is no such folder, or another has the file's name."""
    file = tmp_path / folder / "ds_patches.pth"
    code = f"""if True:
        import sysconfig
        sysconfig.get_path = {{"purelib": {str(file.parent)!r}}}.__getitem__
        from ds_patches.__main__ import main
        raise SystemExit(main([{command!r}]))
    """
    (tmp_path / "full/ds_patches.pth/some").mkdir(parents=True)
    before = listing(tmp_path)
    done = environment.start("-c", code)
    assert listing(tmp_path) == before
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    effect = "written (" if command == "enable" else "removed: "
    assert done.stderr.startswith(f"ds_patches: {file} cannot be {effect}")
    needless = "`python -m ds_patches run -- COMMAND` needs no such file" in done.stderr
    assert needless is (command == "enable")
