"""docs/scripts.md is of the scripts there are, and says what they declare; none is run for this."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import law, page
from tests.scripts.declared import scripts

DECLARED = {page.declared(one, stage): one.stock[stage] for one in scripts() for stage in one.stock}


def test_its_rows_are_the_scripts() -> None:
    found = {(script, stage, awaits): stock for script, stage, stock, *_, awaits in page.rows()}
    odd = found.keys() ^ DECLARED.keys()
    assert not odd, "run `python -m tests.scripts.page` with the names of these scripts"
    for place, declared in DECLARED.items():
        assert law.agrees(declared, found[place]), (*place, found[place])


def test_a_page_is_written_from_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one script can be run anew, and the rest stays."""
    before = page.FILE.read_text(encoding="utf-8")
    known = {(row[0], row[1]): row for row in page.rows()}
    (when,) = [line for line in before.splitlines() if line.startswith("Run ")]
    run, _, rest = when.partition(": ")
    monkeypatch.setattr(page, "FILE", tmp_path / "scripts.md")
    page.write(known, run.removeprefix("Run "), rest.removesuffix(", two CPU ranks (gloo)."))
    assert page.FILE.read_text(encoding="utf-8") == before
