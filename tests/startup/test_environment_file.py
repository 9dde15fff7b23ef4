"""`python -m ds_patches env`: what other hosts need, in DeepSpeed's own file for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_patches.startup import variables
from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment


def as_launched(text: str) -> dict[str, str]:
    """Read a `.deepspeed_env` as DeepSpeed's launchers do; they raise without a "="."""
    parted = [line.split("=", maxsplit=1) for line in text.splitlines()]
    return {name.strip(): value.strip() for name, value in parted}


def test_the_lines_patch_a_program_on_another_host(
    environment: Environment, tmp_path: Path
) -> None:
    done = environment.ds_patches("env", DS_PATCHES="sample", path=(tmp_path,))
    found = as_launched(done.stdout)
    # The launcher's own line for the working directory, which this one takes the place of.
    path = [environment.hook, environment.root, tmp_path]
    assert found == {
        "DS_PATCHES": "sample",
        "DS_PATCHES_PREFIX": str(environment.root),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    assert environment.start("-c", BEFORE_AND_AFTER, **found).stdout == LIVE


def test_an_enabled_host_needs_no_path(enabled: Environment) -> None:
    found = as_launched(enabled.ds_patches("env").stdout)
    assert found == {"DS_PATCHES": "all"}
    assert enabled.start("-c", BEFORE_AND_AFTER, **found).stdout == LIVE


def test_lists_hold_no_comma(environment: Environment) -> None:
    """Slurm's --export splits there."""
    flags = {"DS_PATCHES": "sample, sample", "DS_PATCHES_FORCE": "all,sample,"}
    found = as_launched(environment.ds_patches("env", **flags).stdout)
    assert found["DS_PATCHES"] == "sample+sample"
    assert found["DS_PATCHES_FORCE"] == "all+sample+"
    assert environment.start("-c", BEFORE_AND_AFTER, **found).stdout == LIVE
    of_an_option = [line for line in variables.lines({"DS_PATCHES_A_B": "c, d"}) if "A_B" in line]
    assert of_an_option == ["DS_PATCHES_A_B=c+d"], "which may take several"


OTHERS = {
    "nothing": b"",
    "a few": b"NCCL_DEBUG=INFO\nEMPTY=\n  SPACED = a b \n",
    "no newline at the end": b"NCCL_DEBUG=INFO",
    "of Windows": b"NCCL_DEBUG=INFO\r\nOTHER=1\r\n",
    "odd characters": b"A=\xff\xfe\nB=\xe2\x80\xa8\x0c x=y\n",
    "names like ours": b"DS_PATCH=1\nMY_DS_PATCHES=1\nDS_ENV_FILE=x\n",
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_written_and_removed(environment: Environment, tmp_path: Path, others: bytes) -> None:
    file = tmp_path / "some.env"
    if others:
        file.write_bytes(others)
    ended = others + b"\n" * (bool(others) and not others.endswith(b"\n"))
    for flags in ({"DS_PATCHES": "all"}, {"DS_PATCHES": "sample", "DS_PATCHES_STRICT": "1"}):
        assert environment.ds_patches("env", "--write", file, **flags).returncode == 0
        ours = environment.ds_patches("env", **flags).stdout
        assert file.read_bytes() == ended + ours.encode(), "what was ours before is gone"
    done = environment.ds_patches("env", "--remove", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert file.read_bytes() == ended if others else not file.exists()
    done = environment.ds_patches("env", "--remove", file, DS_PATCHES="smaple")
    said = "" if others else f"ds_patches: there is no file {file}\n"
    assert (done.returncode, done.stdout) == (0, said)


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


@pytest.mark.parametrize(
    ("option", "place"), [("--write", "missing/some.env"), ("--write", "."), ("--remove", ".")]
)
def test_a_file_that_cannot_be_written(
    environment: Environment, tmp_path: Path, option: str, place: str
) -> None:
    told = environment.refuses("env", option, tmp_path / place)
    assert told.startswith(f"ds_patches: {tmp_path / place} cannot be written: ")
    assert not list(tmp_path.iterdir())
