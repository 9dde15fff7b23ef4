"""The judge can fail: each line of the law, a declaration of stock, and a mark of what holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scripts import law, ordinary
from tests.scripts.declared import RIGHT, WRONG
from tests.training.run import Outcome

SCRIPT = replace(ordinary.one_backward, stock={3: RIGHT}, awaits={})
FINE = Outcome(moved=1.0, difference=0.0, peaks=[10], left=[[]], calls=1000, forwards=2)
OFF = replace(FINE, difference=0.5, where="embed.weight")
FAILED = replace(FINE, error="RuntimeError: mat2 must be a matrix")
BROKEN = [
    (OFF, "values"),
    (FAILED, "values"),
    (replace(FINE, moved=0.0), "values"),
    (replace(FINE, races=["write, then read"]), "values"),
    (replace(FINE, said=["lost"]), "words"),
    (replace(FINE, peaks=[11]), "memory"),
    (replace(FINE, left=[["embed.weight"]]), "memory"),
    (replace(FINE, calls=1001 + law.A_STEP + 2 * law.A_FORWARD), "calls"),
]


def complaints(stock: Outcome, patched: Outcome, said: str = RIGHT, **declared: object) -> str:
    script = replace(SCRIPT, stock={3: said}, **declared)
    return " ".join(law.complaints(script, 3, [stock] * 2, [FINE, patched]))


@pytest.mark.parametrize(("patched", "kind"), BROKEN)
def test_where_stock_is_right_so_is_patched(patched: Outcome, kind: str) -> None:
    assert complaints(FINE, patched).startswith(f"{kind}: ")
    assert not complaints(FINE, FINE)
    taken_out = "holds: take it out" in complaints(FINE, FINE, awaits={3: {kind: "a reason"}})
    assert taken_out == (kind != "calls")


def test_where_stock_is_not_right() -> None:
    assert complaints(OFF, OFF, WRONG)
    assert complaints(OFF, FAILED, WRONG)
    assert not complaints(OFF, FAILED, WRONG, refusal="mat2")
    assert complaints(OFF, FINE, RIGHT).startswith("stock is said to be")


def test_where_nothing_is_declared() -> None:
    ours = replace(FINE, error="Refused: a second backward")
    bad = [(FINE, OFF), (FINE, FAILED), (FINE, ours), (OFF, OFF), (OFF, ours), (FAILED, OFF)]
    good = [(FINE, FINE), (OFF, FINE), (FAILED, FINE), (FAILED, FAILED), (FAILED, ours)]
    for pairs, harm in ((bad, True), (good, False)):
        for stock, patched in pairs:
            found = law.harm(SCRIPT, [stock] * 2, [patched] * 2, crossed=True)
            assert bool(found) == harm
