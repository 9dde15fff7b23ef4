"""Launches over hosts: what reaches the ranks there, and what is said where nothing does."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core import fake
from tests.launchers import launch, page
from tests.launchers.hosts import Host
from tests.launchers.launch import Launch, Run
from tests.launchers.outcome import assert_patched, assert_stock

#: Five launches of two ranks each; `make test` has two of one host.
pytestmark = pytest.mark.exhaustive


def remote(folder: Path) -> dict[str, str]:
    """With `pdsh` and `ssh` in front that give a command what a login has, and no more.

    What the ranks of this machine need beyond that stands in the user's own .deepspeed_env.
    """
    (folder / "hostfile").write_text(page.block("text", "slots="), encoding="utf-8")
    own = "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n"
    (folder / ".deepspeed_env").write_text(own, encoding="utf-8")
    environment = launch.environment(folder)
    commands = Path(__file__).with_name("remote")
    return environment | {"PATH": f"{commands}{os.pathsep}{environment['PATH']}"}


def deepspeed_line() -> str:
    port = launch.free_port()
    line = page.line("deepspeed --hostfile")
    return fake.edited(line, "--hostfile", f"--master_port {port} --hostfile")


def test_deepspeed_hands_no_flag_to_other_hosts(folder: Path) -> None:
    line = f"DS_PATCHES=all python -m ds_patches run -- {deepspeed_line()}"
    assert_stock(launch.run(line, folder, remote(folder)))


def test_deepspeed_hands_over_what_env_has_written(folder: Path) -> None:
    environment = remote(folder)
    write = page.line("env --write")
    subprocess.run(["bash", "-c", write], cwd=folder, env=environment, check=True, timeout=60)
    assert_patched(launch.run(deepspeed_line(), folder, environment))


def test_accelerate_writes_the_file_itself(folder: Path) -> None:
    line = fake.edited(page.line("--deepspeed_hostfile"), "29500", launch.free_port())
    assert_patched(launch.run(line, folder, remote(folder)))


def both(hosts: list[Host], lines: list[str], folder: Path, **more: str) -> list[Run]:
    """Launch a line on each host, at once."""
    environment = launch.environment(folder, **more)
    with ExitStack() as running:
        launches = [
            running.enter_context(Launch(line, folder, environment, host.run_in(folder)))
            for host, line in zip(hosts, lines, strict=True)
        ]
        return [one.result() for one in launches]


def test_two_hosts(two_hosts: list[Host], folder: Path) -> None:
    """One is patched by `run`, the other by variables that were exported, as srun does."""
    bare = page.line("torchrun --nnodes 2").partition("-- ")[2]
    exported = f"{page.line('export $')} && {bare}"
    runs = both(two_hosts, [page.line("torchrun --nnodes 2"), exported], folder)
    assert_patched(*runs)
    assert [report["host"] for report in runs[0].reports] == ["host-a", "host-b"]


def test_two_hosts_of_which_one_lacks_the_patches(two_hosts: list[Host], folder: Path) -> None:
    """The patched one names the ranks of the other, and nobody hangs."""
    bare = page.line("torchrun --nnodes 2").partition("-- ")[2]
    lines = [page.line("torchrun --nnodes 2"), bare]
    here, there = both(two_hosts, lines, folder, DS_PATCHES_RANK_TIMEOUT="3")
    silence = "RanksDisagree: the ranks of this engine differ: after 3 s, rank 1 did not say which"
    assert here.code, here
    assert silence in here.output, here
    assert there.code, there
    assert not here.reports, here
