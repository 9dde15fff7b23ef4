"""What `python -m tests.releases` runs, and what it makes of a pytest run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from tests import releases
from tests.core import fake
from tests.releases import columns, record, turn
from tests.releases.__main__ import main
from tests.releases.run import Outcome, chosen, count, run
from tests.releases.run import pytest as run_pytest

KNOWN = tuple(f"0.16.{patch}" for patch in range(10))
BY_DAY = (date.today().toordinal() % 6, f"{date.today()}, as there is no history to count")
MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
def test_worse(): assert False
@pytest.mark.skip(reason="later")
def test_skipped(): pass
"""
SKIPPED = "import pytest\n@pytest.mark.skip(reason='later')\ndef test_skipped(): pass\n"


@pytest.mark.parametrize(
    ("tests", "counts", "trouble"),
    [
        ("def test_good(): pass\n", (1, 0, 0), ""),
        (MIXED, (1, 2, 1), "test_some::test_bad"),
        ("import no_such_module\n", (0, 1, 0), "::test_some"),
        (SKIPPED, (0, 0, 1), "no test ran"),
        ("", (0, 0, 0), "no test ran"),
    ],
    ids=["good", "mixed", "not imported", "all skipped", "nothing selected"],
)
def test_what_a_run_came_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tests: str,
    counts: tuple[int, int, int],
    trouble: str,
) -> None:
    monkeypatch.setattr("tests.releases.ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the test
    (tmp_path / "test_some.py").write_text(tests)
    code, cases = run_pytest("0.16.3", "test_some.py")
    outcome = count("0.16.3", cases, code)
    assert (outcome.passed, outcome.failed, outcome.skipped) == counts
    assert outcome.trouble == trouble
    assert trouble.rpartition("::")[2] in f"{capsys.readouterr().out} no test ran"
    assert not (tmp_path / ".pytest_cache").exists()


def test_what_no_case_says_is_said_by_pytests_code() -> None:
    assert count("0.16.3", [], code=3).trouble == "pytest stopped with code 3"


# What is run, and how much of it at a time.


def test_one_bad_release_is_an_error_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(version: str, arguments: Sequence[str]) -> Outcome:
        return Outcome(version, passed=1, trouble="a::b" if version == KNOWN[0] else "")

    monkeypatch.setattr("tests.releases.run.run_one", one)
    assert run(KNOWN[:3]) == 1
    rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert [row.split()[1] for row in rows] == list(KNOWN[:3]), "in the order they were asked for"


def test_what_was_not_begun_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(version: str, arguments: Sequence[str]) -> Outcome:
        threading.Event().wait(0.3)
        return Outcome(version, passed=1)

    monkeypatch.setattr(releases, "AT_ONCE", 1)
    monkeypatch.setattr("tests.releases.run.run_one", slow)
    assert run(KNOWN[:3], within=0.2) == 0
    printed = capsys.readouterr().out
    assert f"left out, as not begun within 0.2 s: {KNOWN[1]} {KNOWN[2]}\n" in printed
    assert run(KNOWN[:1], within=0.0) == 1, "nothing ran"


def test_an_interrupt_begins_no_more() -> None:
    begun = []

    def interrupted(name: str) -> None:
        begun.append(name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(releases.each(interrupted, KNOWN))
    assert len(begun) < len(KNOWN)


# Which files.


def test_only_files_with_a_core_case_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ROOT", tmp_path)
    marked = "import pytest\n@pytest.mark.core_case\ndef test_a(): pass\n"
    for path in ("a/test_a.py", "test_b.py", "conftest.py"):
        fake.write(tmp_path / "tests" / path, marked)
    fake.write(tmp_path / "tests/test_c.py", "def test_c(): 'core_case'\n")
    assert chosen(whole=False) == ["-m", "core_case", "tests/a/test_a.py", "tests/test_b.py"]
    assert columns.marked_files(["tests/a"]) == ["tests/a/test_a.py"]


def test_the_whole_is_the_tests_of_every_patch() -> None:
    assert chosen(whole=True) == [f"tests/{name}" for name in columns.columns()[1:]]
    assert all((fake.REPOSITORY / path).is_dir() for path in chosen(whole=True))


@pytest.mark.exhaustive
def test_no_core_case_is_in_another_file() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    command.append("--disable-warnings")

    def collected(*arguments: str) -> list[str]:
        done = subprocess.run(
            [*command, *arguments], cwd=fake.REPOSITORY, capture_output=True, text=True
        )
        return sorted(line for line in done.stdout.splitlines() if line.startswith("tests/"))

    assert collected(*chosen(whole=False)) == collected("-m", "core_case", "tests")


# Whose turn it is.


def test_the_turns_together_have_every_release_but_the_installed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn, "version_of", lambda name: KNOWN[-1])
    monkeypatch.setattr(record, "load", lambda: record.Records(releases=KNOWN))
    turns = [turn.releases(turn.Turn(number, 3, "")) for number in range(3)]
    assert sorted(name for one in turns for name in one) == sorted(KNOWN[:-1])
    assert turns[0] == ["0.16.8", "0.16.5", "0.16.2"], "of every era, the newest first"


@pytest.mark.parametrize(
    ("shallow", "number", "why"),
    [("false", 4, "604 commits"), ("true", *BY_DAY), ("", *BY_DAY)],
    ids=["a clone", "a shallow clone", "no clone"],
)
def test_a_turn_says_why_it_is_this_one(
    monkeypatch: pytest.MonkeyPatch, shallow: str, number: int, why: str
) -> None:
    answers = {"rev-parse": shallow, "rev-list": "604"}
    monkeypatch.setattr(columns, "git", lambda command, *rest: answers[command])
    assert str(turn.this(6)) == f"turn {number} of 0 to 5 ({why})"


def test_a_run_installs_its_turn_and_fails_where_it_cannot(
    no_package_index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What an interrupted install leaves is not taken for the release.
    (no_package_index / ".part-0.16.0" / "deepspeed").mkdir(parents=True)
    monkeypatch.setattr(turn, "this", lambda of: turn.Turn(34, of, "34 commits"))
    monkeypatch.setattr(sys, "argv", ["releases", "run", "--turn-of", "40"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert printed.startswith("turn 34 of 0 to 39 (34 commits): 0.16.0\n")
    assert "deepspeed==0.16.0: failed\n" in printed
    assert "could not be installed" in printed
