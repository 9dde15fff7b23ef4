"""What `python -m tests.releases run` makes of a pytest run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases.run import Outcome, read, run, table


def outcome_of(tests: str, folder: Path) -> Outcome:
    """The outcome of a real pytest run over a file with this text."""
    report = folder / "report.xml"
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, f"--junitxml={report}"], cwd=folder, stdout=subprocess.DEVNULL)
    return read("0.16.3", report, done.returncode)


def test_a_failure_is_counted_and_named(tmp_path: Path) -> None:
    outcome = outcome_of(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_worse(): assert False\n"
        "@pytest.mark.skip(reason='later')\n"
        "def test_skipped(): pass\n",
        tmp_path,
    )
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)
    assert outcome.trouble == "test_some::test_bad"


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    outcome = outcome_of("import no_such_module\n", tmp_path)
    assert (outcome.passed, outcome.failed) == (0, 1)
    assert "test_some" in outcome.trouble


@pytest.mark.parametrize(
    "tests",
    ["", "import pytest\n@pytest.mark.skip(reason='later')\ndef test_skipped(): pass\n"],
    ids=["nothing selected", "all skipped"],
)
def test_a_run_without_a_test_is_no_success(tests: str, tmp_path: Path) -> None:
    assert outcome_of(tests, tmp_path).trouble == "no test ran"


def test_a_good_run_has_no_trouble(tmp_path: Path) -> None:
    outcome = outcome_of("def test_good(): pass\n", tmp_path)
    assert (outcome.passed, outcome.failed, outcome.trouble) == (1, 0, "")


def test_the_table_is_aligned() -> None:
    rows = [Outcome("0.16.3", 12, 0, 1, 3.21), Outcome("0.18.2", 1, 2, 0, 123.4, "a::b")]
    header, *lines = table(rows).splitlines()
    ends = [header.index(name) + len(name) for name in ("passed", "failed", "skipped", "seconds")]
    assert [line[: ends[3]].split() for line in lines] == [
        ["0.16.3", "12", "0", "1", "3.2"],
        ["0.18.2", "1", "2", "0", "123.4"],
    ]
    assert [line[header.index("first") :] for line in lines] == ["-", "a::b"]


def test_a_release_that_is_not_installed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What an interrupted install leaves is not taken for the release.
    (tmp_path / ".part-0.16.3" / "deepspeed").mkdir(parents=True)
    monkeypatch.setenv("DEEPSPEED_TEST_RELEASES", str(tmp_path))
    assert run(["0.16.3"], "core_case") == 1
    assert "0.16.3" in capsys.readouterr().err
