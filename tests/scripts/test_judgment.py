"""The judge can fail: each line of the law, and a declaration of stock."""

from dataclasses import replace

import pytest
import torch

from tests.harness.run import Outcome
from tests.harness.trainers import worst_difference
from tests.scripts import law, ordinary
from tests.scripts.declared import RIGHT, WRONG

SCRIPT = replace(ordinary.one_backward, stock={3: RIGHT}, costs={})
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


@pytest.mark.parametrize(("patched", "kind"), BROKEN)
def test_where_stock_is_right_so_is_patched(patched: Outcome, kind: str) -> None:
    (complaint,) = law.complaints(SCRIPT, 3, [FINE] * 2, [FINE, patched])
    assert complaint.startswith(f"{kind}: ")
    assert not law.complaints(SCRIPT, 3, [FINE] * 2, [FINE] * 2)


def test_where_stock_is_wrong() -> None:
    wrong, refused = replace(SCRIPT, stock={3: WRONG}), "mat2"
    assert law.complaints(SCRIPT, 3, [OFF] * 2, [FINE] * 2), "it is not as declared"
    for patched in (OFF, FAILED):
        assert law.complaints(wrong, 3, [OFF] * 2, [patched] * 2)
    assert not law.complaints(replace(wrong, refusal=refused), 3, [OFF] * 2, [FAILED] * 2)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_infinitely_far_off(odd: float) -> None:
    right = {"a": torch.zeros(2), "b": torch.ones(2)}
    wrong = right | {"a": torch.tensor([0.0, odd])}
    assert worst_difference(wrong, right) == (float("inf"), "a")
    assert worst_difference(right, right)[0] == 0
