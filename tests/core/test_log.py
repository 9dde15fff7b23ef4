"""How loud the package is, and where it speaks: each line once, whoever sets up logging."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_patches.core import flags, log

Capture = pytest.CaptureFixture[str]


@contextmanager
def program(level: str = "NOTSET") -> Iterator[logging.Logger]:
    """Our logger, in a program that has set up no more than its level; pytest sets up some."""
    ours = logging.getLogger("ds_patches")
    before = ours.level
    ours.setLevel(level)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for logger in (ours, logging.getLogger()):
            monkeypatch.setattr(logger, "handlers", [])
        yield ours
    ours.setLevel(before)


@pytest.mark.parametrize(
    ("flag", "own", "heard"),
    [
        ("", "NOTSET", "info error"),
        ("DEBUG", "NOTSET", "debug info error"),
        ("error", "DEBUG", "error"),
        ("", "DEBUG", "debug info error"),  # which the program has chosen
        ("", "WARNING", "error"),
    ],
)
def test_how_much_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, flag: str, own: str, heard: str
) -> None:
    monkeypatch.setenv("DS_PATCHES_LOG", flag)
    with program(own) as ours:
        for _ in range(2):
            log.set_up(flags.read({}).level)
        for level in ("debug", "info", "error"):
            getattr(ours, level)(level)
    assert capsys.readouterr().err == "".join(f"ds_patches: {level}\n" for level in heard.split())


@pytest.mark.parametrize("name", ["", "ds_patches"])
def test_a_line_is_not_said_twice(capsys: Capture, name: str) -> None:
    """The program may have a handler for all, or one for us; before we speak, or after."""
    with program() as ours:
        log.set_up()
        ours.info("one")
        logging.getLogger(name).addHandler(logging.StreamHandler(sys.stdout))
        log.set_up()
        ours.info("two")
    assert capsys.readouterr() == ("two\n", "ds_patches: one\n")
