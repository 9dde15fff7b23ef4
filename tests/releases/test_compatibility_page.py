"""How docs/compatibility.md shows what was recorded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import ds_patches
from tests.core import fake
from tests.releases import columns, git, page, pairs, record
from tests.releases.cell import Cell
from tests.releases.columns import CORE
from tests.releases.made_up import a_record, recorded

PATCH = ds_patches.names()[0]
COMMITTED = record.load()


def test_the_page_says_why_a_cell_is_no_pass() -> None:
    bad = replace(a_record("0.19.9", PATCH, Cell.FAILED), why="tests.a::b", date="2026-02-01")
    text = page.render(recorded("0.19.8", "0.19.9", "0.19.10", but=[bad]))
    main = text.split("\n## With another torch\n")[0]
    rows = [line.split(" | ")[0] for line in main.splitlines() if line.startswith("| 0.")]
    assert rows == ["| 0.19.10", "| 0.19.9", "| 0.19.8"]
    assert f"- 0.19.9, `{PATCH}`: failed: tests.a::b\n" in text
    assert "**failed**" in text
    assert "2026-02-01 to " in text


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
    assert "| **failed** |" not in main
    assert "\n| 0.19.9 | 2.6.0 | pass (3) | **failed** |" in rest
    assert f"- 0.19.9 with torch 2.6.0, `{PATCH}`: failed: tests.a::b\n" in rest


def test_every_pair_was_run() -> None:
    found = record.load().of
    missing = [str(pair) for pair in pairs.known() if (pair.release, pair.torch, CORE) not in found]
    assert not missing


def test_the_page_says_what_was_checked_out() -> None:
    older = replace(a_record("0.19.8", CORE), commit="0a0a0a0+", date="2025-01-01")
    text = page.render(recorded("0.19.8", "0.19.9", but=[older]))
    today = a_record("0.19.9", CORE).date
    assert f"| `{CORE}` | 2025-01-01 to {today} | 0a0a0a0+, abc1234 |\n" in text


def test_a_commit_says_when_the_column_was_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(git, "says", lambda command, *rest: answers[command])
    assert columns.commit(PATCH) == "abc1234"
    answers["status"] = f" M tests/{PATCH}/test_a.py"
    assert columns.commit(PATCH) == "abc1234+"
    answers["rev-parse"] = ""
    assert columns.commit(PATCH) == "", "no repository"


def test_the_page_says_which_tests_run_on_stand_ins() -> None:
    text = page.render(COMMITTED)
    rows = re.findall(r"^\| `(\w+)` \| .* `(tests/\S+)` ", text, re.MULTILINE)
    assert [column for column, _ in rows] == list(page.STAND_INS)
    assert all((fake.REPOSITORY / path).is_file() for _, path in rows)
