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
from tests.releases import __main__, pairs
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
    with suppress(KeyboardInterrupt):
        assert pairs.in_its_environment(Pair("0.16.9", "2.6.0"), work, again=False)
    assert [path.name for path in no_package_index.iterdir()] == ["0.16.9"]


def test_a_command_that_is_terminated_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "_do", lambda given: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["releases", "record", "--pair", "0.16.9+2.6.0"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert __main__.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "the same command goes on here" in capsys.readouterr().err


@pytest.mark.exhaustive  # it makes an environment
def test_a_torch_that_is_not_there_is_said(no_package_index: Path) -> None:
    a_release(no_package_index, "0.16.9")
    trouble = pairs.in_its_environment(Pair("0.16.9", "2.6.0"), fails, again=False)
    assert "torch==2.6.0" in trouble
    assert [path.name for path in no_package_index.iterdir()] == ["0.16.9"]
