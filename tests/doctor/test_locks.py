"""A lock that a killed build left behind is named, with its age and the line that helps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ds_patches.commands import locks
from tests import shell

MINUTE = 60.0


def lock_of(folder: Path, age: float = 0.0) -> Path:
    """A lock as torch makes it, this many seconds ago."""
    folder.mkdir(parents=True)
    lock = folder / "lock"
    os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    before = time.time() - age
    os.utime(lock, (before, before))
    return lock


def test_doctor_names_an_old_lock_and_how_to_remove_it(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    lock = lock_of(folder / "deepspeed_shm_comm", age=35 * MINUTE)
    said = shell.doctor(TORCH_EXTENSIONS_DIR=str(folder))
    (warning,) = [line for line in said if line.startswith("warning: ")]
    assert f"{lock} is 35 minutes old" in warning
    assert "the extension deepspeed_shm_comm" in warning
    command = warning.rpartition(": ")[2]
    subprocess.run(command, shell=True, check=True)  # though the folder's name has a blank
    said = shell.doctor(TORCH_EXTENSIONS_DIR=str(folder))
    assert not [line for line in said if line.startswith("warning: ")]


def test_a_young_lock_is_a_build_at_work(tmp_path: Path) -> None:
    lock_of(tmp_path / "deepspeed_shm_comm", age=9 * MINUTE)
    assert locks.lines({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    (line,) = locks.lines({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, older_than=8 * MINUTE)
    assert "9 minutes old" in line
    lock_of(tmp_path / "op", age=3 * 60 * MINUTE)
    (line,) = locks.lines({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert "3 hours old" in line


#: Where torch itself would build, for each variable that has a say in it.
ASK = """
import os, sys
from torch.utils import cpp_extension

for variable in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):  # each goes before the last
    os.environ[variable] = os.path.join(sys.argv[1], variable)
    print(variable, cpp_extension._get_build_directory("op", False))
"""


def test_it_is_looked_for_where_torch_builds(tmp_path: Path) -> None:
    unset = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    ask = [sys.executable, "-c", ASK, str(tmp_path)]
    said = subprocess.run(ask, env=clean, capture_output=True, text=True, check=True).stdout
    here: dict[str, str] = {}
    for variable, folder in (line.split() for line in said.splitlines()):
        assert folder.startswith(str(tmp_path / variable))
        Path(folder).rmdir()
        lock = lock_of(Path(folder), age=3 * 24 * 60 * MINUTE)
        here[variable] = str(tmp_path / variable)
        (line,) = locks.lines(here)
        assert line.startswith(f"{lock} is 3 days old")
    assert list(here) == ["HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"]


def test_no_folder_is_no_lock(tmp_path: Path) -> None:
    assert locks.lines({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}) == []
