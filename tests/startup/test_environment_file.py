"""`python -m ds_patches env`: what other hosts need, in DeepSpeed's own file for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment


def as_launched(text: str) -> dict[str, str]:
    """Read a `.deepspeed_env` as DeepSpeed's launchers do; they raise without a "="."""
    parted = [line.split("=", maxsplit=1) for line in text.splitlines()]
    return {name.strip(): value.strip() for name, value in parted}


def lines_of(here: Environment, *path: Path, **variables: str) -> dict[str, str]:
    """The lines of an environment, under which a program of another host is patched."""
    found = as_launched(here.ds_patches("env", path=path, **variables).stdout)
    assert here.prints("-c", BEFORE_AND_AFTER, **found) == LIVE
    return found


def test_the_lines_patch_a_program_on_another_host(
    environment: Environment, tmp_path: Path
) -> None:
    another = tmp_path / "another/ds_patches/startup/hook"
    path = (tmp_path / "a", environment.hook, another, tmp_path / "b")
    # The launcher's own line for the working directory, which this one takes the place of.
    kept = [environment.hook, environment.root, tmp_path / "a", tmp_path / "b"]
    assert lines_of(environment, *path, DS_PATCHES="sample") == {
        "DS_PATCHES": "sample",
        "DS_PATCHES_PREFIX": str(environment.root),
        "PYTHONPATH": os.pathsep.join(map(str, kept)),
    }


def test_lists_hold_no_comma_and_an_enabled_host_needs_no_path(enabled: Environment) -> None:
    """Slurm's --export splits there."""
    assert lines_of(enabled, DS_PATCHES="") == {"DS_PATCHES": "all"}
    flags = {"DS_PATCHES": "sample, sample", "DS_PATCHES_FORCE": "sample,sample,"}
    found = {"DS_PATCHES": "sample+sample", "DS_PATCHES_FORCE": "sample+sample+"}
    assert lines_of(enabled, **flags) == found


@pytest.mark.parametrize(
    "others",
    [
        b"",
        b"NCCL_DEBUG=INFO\nEMPTY=\n  SPACED = a b \n",
        b"NCCL_DEBUG=INFO\r\nOTHER=1\r\n",
        b"A=\xff\xfe\nB=\xe2\x80\xa8\x0c x=y\n",
    ],
)
def test_written_and_removed(environment: Environment, tmp_path: Path, others: bytes) -> None:
    file = tmp_path / "some.env"
    if others:
        file.write_bytes(others)
    for flags in ({"DS_PATCHES": "all"}, {"DS_PATCHES": "sample", "DS_PATCHES_STRICT": "1"}):
        assert environment.ds_patches("env", "--write", file, **flags).returncode == 0
        ours = environment.ds_patches("env", **flags).stdout
        assert file.read_bytes() == others + ours.encode(), "what was ours before is gone"
    done = environment.ds_patches("env", "--remove", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert file.read_bytes() == others if others else not file.exists()
    done = environment.ds_patches("env", "--remove", file, DS_PATCHES="smaple")
    assert (done.returncode, bool(done.stdout)) == (0, not others), "there is no such file"


def test_lines_that_launchers_do_not_take_as_they_stand(own: Environment) -> None:
    """They stop at blank ones, and of two of one name take the last; the file is theirs."""
    gone = "PYTHONPATH=/gone/lib/ds_patches/startup/hook:/work\nDS_PATCHES=none\n"
    theirs = "A=1\nPYTHONPATH=/data/code:/data/more\n"
    file = fake.write(own.root / ".deepspeed_env", f"A=1\n\n \n{gone}{theirs[4:]}\n")
    for _ in range(2):
        own.ds_patches("env", "--write", path=(own.site,))
        found = as_launched(file.read_text())
        assert (next(iter(found)), found["DS_PATCHES"]) == ("A", "all")
        expected = [str(own.hook), str(own.root), "/data/code", "/data/more"]
        assert found["PYTHONPATH"].split(":") == expected
    own.ds_patches("env", "--remove")
    assert file.read_text() == theirs


def test_a_file_that_cannot_be_written(environment: Environment, tmp_path: Path) -> None:
    for option, place in (("--write", "missing/some.env"), ("--write", "."), ("--remove", ".")):
        told = environment.refuses("env", option, tmp_path / place)
        assert told.startswith(f"ds_patches: {tmp_path / place} cannot be written: ")
        assert not list(tmp_path.iterdir())
