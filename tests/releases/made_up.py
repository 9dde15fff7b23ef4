"""Records of runs that never were, for the tests of what is made of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_patches.core.state import State
from tests.releases import columns, matrix
from tests.releases.cell import Answer, Cell
from tests.releases.columns import CORE
from tests.releases.record import TORCH, Record, Records
from tests.releases.run import Outcome

BAD = Outcome("0.19.9", passed=2, failed=1, trouble="tests.a::b")


def a_record(
    version: str,
    column: str,
    cell: Cell = Cell.PASS,
    sources: str = "",
    torch: str = TORCH,
) -> Record:
    outcome = Outcome(version, passed=3) if cell is Cell.PASS else BAD
    answer = None if column == CORE else Answer(State.READY, "in range", live=True)
    sources = sources or columns.sources(column)
    made = matrix.recorded(version, column, sources, "abc1234", answer, outcome)
    return replace(made, cell=cell, torch=f"{torch}+cpu")


def recorded(*versions: str, but: Sequence[Record] = ()) -> Records:
    """Releases on which everything passed, but for these records."""
    passed = (a_record(version, c) for version in versions for c in columns.columns())
    return Records().knowing(versions, "2026-01-01").adding(passed).adding(but)
