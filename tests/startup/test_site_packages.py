"""`enable` and `disable`: one file in site-packages, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment


def listing(folder: Path) -> list[str]:
    """All that lies under a folder, but for what importing leaves."""
    return sorted(str(one) for one in folder.rglob("*") if "__pycache__" not in one.parts)


def test_enabling_and_disabling_are_idempotent_and_leave_nothing(own: Environment) -> None:
    before = listing(own.root)
    file = own.site / "ds_patches.pth"
    assert own.ds_patches("disable").returncode == 0
    first, second = own.ds_patches("enable"), own.ds_patches("enable")
    assert first.returncode == second.returncode == 0
    assert str(file) in first.stdout == second.stdout
    assert listing(own.root) == sorted([*before, str(file)])
    assert file.read_text().count("\n") == 1, "Python runs lines that begin with import, each alone"
    file.write_text("import of_an_older_version")
    own.ds_patches("enable")
    assert own.prints("-c", BEFORE_AND_AFTER, DS_PATCHES="sample") == LIVE
    assert str(file) in own.ds_patches("disable").stdout
    assert own.ds_patches("disable").returncode == 0
    assert listing(own.root) == before


@pytest.mark.parametrize("words", ["enable missing", "enable full", "disable full"])
def test_where_nothing_can_be_written(environment: Environment, tmp_path: Path, words: str) -> None:
    """Not by root either: there is no such folder, or another has the file's name."""
    command, folder = words.split()
    code = f"""if True:
        import sysconfig
        sysconfig.get_path = {{"purelib": {str(tmp_path / folder)!r}}}.__getitem__
        from ds_patches.__main__ import main
        raise SystemExit(main([{command!r}]))
    """
    (tmp_path / "full/ds_patches.pth/some").mkdir(parents=True)
    before = listing(tmp_path)
    done = environment.start("-c", code)
    assert listing(tmp_path) == before
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{tmp_path / folder / 'ds_patches.pth'} cannot be " in done.stderr
