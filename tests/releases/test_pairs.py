"""Releases with another torch: which, and in which environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from tests.core import fake
from tests.releases import pairs
from tests.releases.pairs import Pair
from tests.releases.record import TORCH


def test_a_pair_is_a_release_and_a_torch() -> None:
    assert pairs.parse("0.16.9+2.6.0") == Pair("0.16.9", "2.6.0")
    for wrong in ("0.16.9", "0.16.9+", "+2.6.0"):
        with pytest.raises(ValueError, match="is no pair"):
            pairs.parse(wrong)


def test_the_known_pairs_are_not_in_the_main_table() -> None:
    known = pairs.known()
    assert len({str(pair) for pair in known}) == len(known)
    assert all(str(Version(pair.torch)) == pair.torch != TORCH for pair in known)


def a_release(folder: Path, version: str, *requires: str) -> None:
    """A release whose metadata asks for this."""
    needed = "".join(f"Requires-Dist: {one}\n" for one in requires)
    metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n{needed}"
    fake.write(folder / version / f"deepspeed-{version}.dist-info" / "METADATA", metadata)


def test_an_environment_has_what_the_release_asks_for(no_package_index: Path) -> None:
    a_release(no_package_index, "0.16.9", "torch", "hjson", "numpy<2", 'tabulate; extra == "x"')
    wanted = pairs.requirements(Pair("0.16.9", "2.6.0"))
    assert wanted[:3] == ["torch==2.6.0", "hjson", "numpy<2"]
    assert "tabulate" not in " ".join(wanted)


def fails(python: Path, pair: Pair, again: bool) -> str:
    return "stopped with code 1"


def stops(python: Path, pair: Pair, again: bool) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("work", [fails, stops])
def test_an_environment_is_removed_whatever_happens(
    no_package_index: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[..., str]
) -> None:
    def make(folder: Path, pair: Pair) -> str:
        (folder / "bin").mkdir(parents=True)
        return ""

    monkeypatch.setattr(pairs, "_make", make)
    a_release(no_package_index, "0.16.9")
    if work is stops:
        with pytest.raises(KeyboardInterrupt):
            pairs.in_its_environment(Pair("0.16.9", "2.6.0"), work, again=False)
    else:
        assert pairs.in_its_environment(Pair("0.16.9", "2.6.0"), work, again=False)
    assert [path.name for path in no_package_index.iterdir()] == ["0.16.9"]


def test_a_command_that_is_terminated_tidies_up(tmp_path: Path) -> None:
    a_release(tmp_path, "0.16.9")
    fake.write(tmp_path / "bin" / "sleeping", "#!/bin/sh\nexec sleep 60\n").chmod(0o755)
    script = f"""
import sys
from tests.releases import __main__, pairs
pairs._outstanding = lambda pair: ["core"]
sys.executable = {str(tmp_path / "bin" / "sleeping")!r}  # in place of making an environment
sys.argv = ["releases", "record", "--pair", "0.16.9+2.6.0"]
sys.exit(__main__.main())
"""
    running = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=fake.REPOSITORY,
        env=os.environ | {"DEEPSPEED_TEST_RELEASES": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    assert "with torch 2.6.0" in running.stdout.readline()
    assert "already there" in running.stdout.readline()
    running.terminate()
    rest, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command goes on here" in rest


@pytest.mark.exhaustive  # it makes an environment
def test_a_torch_that_is_not_there_is_said(no_package_index: Path) -> None:
    a_release(no_package_index, "0.16.9")
    trouble = pairs.in_its_environment(Pair("0.16.9", "2.6.0"), fails, again=False)
    assert "torch==2.6.0" in trouble
    assert [path.name for path in no_package_index.iterdir()] == ["0.16.9"]
