"""docs/scripts.md is of the scripts there are, and says what they declare; none is run for this."""

from __future__ import annotations

from tests.scripts import law, page
from tests.scripts.declared import scripts


def test_its_rows_are_the_scripts() -> None:
    found = [(row["script"], row["ZeRO"], row["awaits"]) for row in page.rows()]
    wanted = [page.declared(one, stage) for one in scripts() for stage in one.stock]
    assert sorted(found) == sorted(wanted), "run `python -m tests.scripts.page`"


def test_stock_is_what_it_is_declared_to_be() -> None:
    written = {(row["script"], row["ZeRO"]): row["stock"] for row in page.rows()}
    for script in scripts():
        for stage, declared in script.stock.items():
            name, at, _ = page.declared(script, stage)
            assert law.agrees(declared, written[name, at]), (name, at, written[name, at])
