"""Releases with another torch: which, and in which environment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.version import Version

from tests.core import fake
from tests.releases import __main__, matrix, pairs
from tests.releases.pairs import Pair
from tests.releases.record import TORCH

PAIR = Pair("0.16.9", "2.6.0")


def test_a_pair_is_a_release_and_a_torch() -> None:
    assert pairs.parse("0.16.9+2.6.0") == PAIR
    for wrong in ("0.16.9", "0.16.9+", "+2.6.0"):
        with pytest.raises(ValueError, match="is no pair"):
            pairs.parse(wrong)


def test_the_known_pairs_are_not_in_the_main_table() -> None:
    known = pairs.known()
    assert len({*known}) == len(known)
    assert all(str(Version(pair.torch)) == pair.torch != TORCH for pair in known)


@pytest.fixture
def folder(no_package_index: Path) -> Path:
    """With a release whose metadata asks for something."""
    needed = ("torch", "hjson", "numpy<2", 'tabulate; extra == "x"')
    lines = ("Metadata-Version: 2.1", "Name: deepspeed", f"Version: {PAIR.release}")
    metadata = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in needed), ""])
    place = no_package_index / PAIR.release / f"deepspeed-{PAIR.release}.dist-info"
    fake.write(place / "METADATA", metadata)
    return no_package_index


def test_an_environment_has_what_the_release_asks_for(folder: Path) -> None:
    wanted = pairs.requirements(PAIR)
    assert wanted[:3] == ["torch==2.6.0", "hjson", "numpy<2"]
    assert "tabulate" not in " ".join(wanted)


def fails(python: Path) -> str:
    return "stopped with code 1"


def stops(python: Path) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("work", [fails, stops])
def test_an_environment_is_removed_whatever_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], str]
) -> None:
    def make(folder: Path, pair: Pair) -> str:
        (folder / "bin").mkdir(parents=True)
        return ""

    monkeypatch.setattr(pairs, "_make", make)
    with suppress(KeyboardInterrupt):
        assert pairs.in_its_environment(PAIR, work)
    assert [path.name for path in folder.iterdir()] == ["0.16.9"]


def test_a_command_that_is_terminated_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "run", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["releases", "record", "0.16.9"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert __main__.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "the same command goes on here" in capsys.readouterr().err


@pytest.mark.exhaustive  # it makes an environment
def test_a_torch_that_is_not_there_is_said(folder: Path) -> None:
    assert "torch==2.6.0" in pairs.in_its_environment(PAIR, fails)
    assert [path.name for path in folder.iterdir()] == ["0.16.9"]
