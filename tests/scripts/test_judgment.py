"""The judge: each line of the law fails where it should, and a mark of what holds does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scripts import law, ordinary
from tests.scripts.declared import RIGHT, WRONG, raises
from tests.training.run import Outcome

SCRIPT = replace(ordinary.one_backward, stock={3: RIGHT}, awaits={})
FINE = Outcome(moved=1.0, difference=0.0, peaks=[10], left=[[]], calls=1000, forwards=2)
OFF = replace(FINE, difference=0.5, where="embed.weight")
FAILED = replace(FINE, error="RuntimeError: mat2 must be a matrix")


def complaints(stock: Outcome, patched: Outcome, said: str, **declared: object) -> list[str]:
    script = replace(SCRIPT, stock={3: said}, **declared)
    return law.complaints(script, 3, [stock] * 2, [FINE, patched])


@pytest.mark.parametrize(
    ("patched", "kind"),
    [
        (OFF, "values"),
        (FAILED, "values"),
        (replace(FINE, races=["write, then read"]), "values"),
        (replace(OFF, said=["lost"]), "values"),
        (replace(FINE, said=["lost"]), "words"),
        (replace(FINE, peaks=[11]), "memory"),
        (replace(FINE, left=[["embed.weight"]]), "memory"),
        (replace(FINE, calls=1001 + 2 * law.A_FORWARD), "calls"),
    ],
)
def test_stock_is_right(patched: Outcome, kind: str) -> None:
    (found,) = complaints(FINE, patched, RIGHT)
    assert found.startswith(f"{kind}: ")
    assert not complaints(FINE, patched, RIGHT, awaits={3: {kind: "core"}})
    assert not complaints(FINE, FINE, RIGHT)


def test_stock_is_wrong() -> None:
    assert complaints(OFF, OFF, WRONG)
    assert complaints(OFF, FAILED, WRONG)
    assert not complaints(OFF, FAILED, WRONG, refusal="mat2")
    assert not complaints(OFF, FINE, WRONG)


def test_a_warning_will_do_where_stock_is_silently_wrong() -> None:
    warned = replace(OFF, said=["lost"])
    assert not law.complaints(replace(SCRIPT, stock={3: WRONG}), 3, [OFF] * 2, [warned] * 2)
    assert complaints(FAILED, warned, raises("mat2"))


def test_where_nothing_is_declared() -> None:
    warned = replace(OFF, said=["lost"])
    good = [(stock, FINE) for stock in (FINE, OFF, FAILED)]
    good += [(OFF, warned), (OFF, FAILED), (FAILED, FAILED)]
    bad = [(FINE, OFF), (FINE, warned), (FINE, FAILED), (OFF, OFF), (FAILED, OFF), (FAILED, warned)]
    assert not [pair for pair in good if law.harm(*([one] * 2 for one in pair))]
    assert all(law.harm(*([one] * 2 for one in pair)) for pair in bad)


def test_stock_is_not_what_it_is_declared_to_be() -> None:
    for said, stock in ((RIGHT, OFF), (WRONG, FINE), (raises("shape"), FAILED), (RIGHT, FAILED)):
        (found,) = complaints(stock, FINE, said)
        assert found.startswith("stock is said to be")
    assert not complaints(FAILED, FINE, raises("mat2"))


@pytest.mark.parametrize("kind", law.KINDS)
def test_a_mark_is_strict(kind: str) -> None:
    (found,) = complaints(FINE, FINE, RIGHT, awaits={3: {kind: "core"}})
    assert found.startswith(f"{kind} holds: take it out")


def test_a_script_that_moves_nothing_is_not_right() -> None:
    still = replace(FINE, moved=0.0)
    assert law.verdict([still]) == WRONG
