"""How docs/compatibility.md shows what was recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

import ds_patches
from ds_patches.core.state import State
from tests.core import fake
from tests.releases import columns, matrix, page, pairs, record
from tests.releases.columns import CORE
from tests.releases.matrix import Answer
from tests.releases.record import TORCH, Cell, Record, Records
from tests.releases.run import Outcome

PATCH = ds_patches.names()[0]
COMMITTED = record.load()
BAD = Outcome("0.19.9", passed=2, failed=1, trouble="tests.a::b")


def a_record(
    version: str, column: str, cell: Cell = Cell.PASS, sources: str = "", torch: str = TORCH
) -> Record:
    """Of a run that never was."""
    outcome = Outcome(version, passed=3) if cell is Cell.PASS else BAD
    answer = None if column == CORE else Answer(State.READY, "in range", live=True)
    sources = sources or columns.sources(column)
    made = matrix.recorded(version, column, sources, "abc1234", answer, outcome)
    return replace(made, cell=cell, torch=f"{torch}+cpu")


def recorded(*versions: str, but: Sequence[Record] = ()) -> Records:
    """Releases on which everything passed, but for these records."""
    passed = (a_record(version, c) for version in versions for c in columns.columns())
    return Records().knowing(versions, "2026-01-01").adding(passed).adding(but)


def test_it_is_what_the_records_give() -> None:
    written = page.FILE.read_text(encoding="utf-8")
    assert written == page.render(COMMITTED), "python -m tests.releases page"
    makefile = (fake.REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"\nTORCH := {TORCH}\n" in makefile, "the main table is of the torch that is installed"
    assert f"\n## With torch {TORCH}\n" in written


def test_it_says_why_a_cell_is_no_pass_and_what_was_checked_out() -> None:
    bad = replace(a_record("0.19.9", PATCH, Cell.FAILED), why="tests.a::b", date="2025-02-01")
    older = replace(a_record("0.19.8", CORE), commit="0a0a0a0+", date="2025-01-01")
    text = page.render(recorded("0.19.8", "0.19.9", "0.19.10", but=[bad, older]))
    main, rest = text.split("\n## With another torch\n")
    rows = [line.split(" | ")[0] for line in main.splitlines() if line.startswith("| 0.")]
    assert rows == ["| 0.19.10", "| 0.19.9", "| 0.19.8"]
    assert f"- 0.19.9, `{PATCH}`: failed: tests.a::b\n" in main
    assert "**failed**" in main
    today = a_record("0.19.9", CORE).date
    assert f"Run 2025-01-01 to {today}: " in main
    assert f"| `{CORE}` | 2025-01-01 to {today} | 0a0a0a0+, abc1234 |\n" in rest


def test_another_torch_has_a_table_of_its_own() -> None:
    other = [a_record("0.19.9", column, torch="2.6.0") for column in columns.columns()]
    bad = replace(a_record("0.19.9", PATCH, Cell.FAILED, torch="2.6.0"), why="tests.a::b")
    records = recorded("0.19.9", but=[*other, bad])
    assert records.outstanding("0.19.9") == []
    assert records.outstanding("0.19.9", "2.6.0") == [PATCH]
    main, rest = page.render(records).split("\n## With another torch\n")
    for pair in pairs.known():
        unknown = " | ".join(["**unknown**"] * len(columns.columns()))
        assert f"| {pair.release} | {pair.torch} | {unknown} |\n" in rest, "nobody ran it"
    assert "| 0.19.9 | pass (3) |" in main
    assert "**failed**" not in main
    assert "\n| 0.19.9 | 2.6.0 | pass (3) | **failed** |" in rest
    assert f"- 0.19.9 with torch 2.6.0, `{PATCH}`: failed: tests.a::b\n" in rest


def test_every_pair_was_run() -> None:
    missing = [
        str(pair) for pair in pairs.known() if (pair.release, pair.torch, CORE) not in COMMITTED.of
    ]
    assert not missing


def test_a_commit_says_when_the_column_was_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(columns, "git", lambda command, *rest: answers[command])
    assert columns.commit(PATCH) == "abc1234"
    answers["status"] = f" M tests/{PATCH}/test_a.py"
    assert columns.commit(PATCH) == "abc1234+"
    answers["rev-parse"] = ""
    assert columns.commit(PATCH) == "", "no repository"


def test_it_says_which_tests_run_on_stand_ins() -> None:
    text = page.FILE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* `(tests/\S+)` ", text, re.MULTILINE)
    assert [column for column, _ in rows] == list(page.STAND_INS)
    assert all((fake.REPOSITORY / path).is_file() for _, path in rows)
