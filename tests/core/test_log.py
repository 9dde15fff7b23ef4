"""How loud the package is, and where it speaks: each line once, whoever sets up logging."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from ds_patches.core import flags


@contextmanager
def program(level: str = "NOTSET") -> Iterator[logging.Logger]:
    """Our logger, in a program that has set up no more than its level; pytest sets up some."""
    ours = logging.getLogger("ds_patches")
    before = ours.level
    ours.setLevel(level)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for one in (ours, logging.getLogger()):
            monkeypatch.setattr(one, "handlers", [])
        yield ours
    ours.setLevel(before)


@pytest.mark.parametrize(
    ("flag", "own", "heard"),
    [
        ("", "NOTSET", ["info", "error"]),
        ("DEBUG", "NOTSET", ["debug", "info", "error"]),
        ("error", "DEBUG", ["error"]),
        ("", "DEBUG", ["debug", "info", "error"]),  # which the program has chosen
        ("", "WARNING", ["error"]),
    ],
)
def test_how_much_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    own: str,
    heard: list[str],
) -> None:
    monkeypatch.setenv("DS_PATCHES_LOG", flag)
    with program(own) as logger:
        for _ in range(2):
            flags.read({})
        for level in ("debug", "info", "error"):
            getattr(logger, level)(level)
    assert capsys.readouterr().err == "".join(f"ds_patches: {one}\n" for one in heard)


@pytest.mark.parametrize("name", ["", "ds_patches"])
@pytest.mark.parametrize("first", [True, False])
def test_a_line_is_not_said_twice(
    capsys: pytest.CaptureFixture[str], name: str, first: bool
) -> None:
    """The program may have a handler for all, or one for us; before we speak, or after."""
    theirs = logging.StreamHandler(sys.stdout)
    with program() as logger:
        if first:
            logging.getLogger(name).addHandler(theirs)
        flags.read({})
        logger.info("one")
        if not first:
            logging.getLogger(name).addHandler(theirs)
        logger.info("two")
    expected = ("one\ntwo\n", "") if first else ("two\n", "ds_patches: one\n")
    assert capsys.readouterr() == expected


def test_it_speaks_on_the_stderr_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    """Test runners and notebooks put their own in its place, and close it again."""
    with program() as logger:
        with redirect_stderr(io.StringIO()) as taken:
            flags.read({})
            logger.info("one")
        assert taken.getvalue() == "ds_patches: one\n"
        taken.close()
        logger.info("two")
    assert capsys.readouterr().err == "ds_patches: two\n"
