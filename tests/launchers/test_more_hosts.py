"""Launches over hosts: what reaches the ranks there, and what is said where nothing does."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launchers import launch
from tests.launchers.launch import assert_patched, assert_stock, block, launched, line_with

#: Five launches of two ranks each; `make test` has two of one host.
pytestmark = pytest.mark.exhaustive


@pytest.fixture
def remote(folder: Path) -> dict[str, str]:
    """With `pdsh` and `ssh` in front that give a command what a login has, and no more.

    What the ranks of this machine need beyond that stands in the user's own .deepspeed_env.
    """
    (folder / "hostfile").write_text(block("text", "slots="), encoding="utf-8")
    own = "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n"
    (folder / ".deepspeed_env").write_text(own, encoding="utf-8")
    environment = launch.environment(folder)
    commands = Path(__file__).with_name("remote")
    return environment | {"PATH": f"{commands}{os.pathsep}{environment['PATH']}"}


def deepspeed_line() -> str:
    port = f"--master_port {launch.free_port()} --hostfile"
    return line_with("deepspeed --hostfile", ("--hostfile", port))


def test_deepspeed_hands_no_flag_to_other_hosts(folder: Path, remote: dict[str, str]) -> None:
    line = f"ds-patches run -- {deepspeed_line()}"
    assert_stock(launch.run(line, folder, remote))


def test_deepspeed_hands_over_the_lines_of_its_file(
    folder: Path, remote: dict[str, str], installed: Path
) -> None:
    subprocess.run(["bash", "-c", line_with("echo DS_PATCHES")], cwd=folder, check=True, timeout=60)
    path = f"{installed / 'bin'}{os.pathsep}{remote['PATH']}"
    assert_patched(launch.run(deepspeed_line(), folder, remote | {"PATH": path}))


def test_accelerate_writes_the_file_itself(folder: Path, remote: dict[str, str]) -> None:
    line = line_with("--deepspeed_hostfile", ("29500", launch.free_port()))
    assert_patched(launch.run(line, folder, remote))


def test_a_line_on_each_host(folder: Path, installed: Path) -> None:
    """One is patched by `run`, the other by a variable that was exported, as srun does."""
    meeting = ("host-a:29500", f"127.0.0.1:{launch.free_port()}")
    line = line_with("torchrun --nnodes 2", meeting)
    other = f"{line_with('export DS_PATCHES')} && {line.partition('-- ')[2]}"
    first, second = launch.environment(folder), launch.environment_of(installed, folder)
    with launched(line, folder, first) as ended, launched(other, folder, second) as other_ended:
        assert_patched(ended(), other_ended())
