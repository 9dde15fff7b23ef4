"""Muon orthogonalises the gradient of a step: where DeepSpeed does a backward's, a second one is an
error.
"""

from typing import Any

import pytest

from tests.harness import ALL_REDUCED, Options, models, on_ranks, run, stock
from tests.harness.stock import RELEASE, Version


def two_backwards(trainer: Any, step: int) -> None:
    """All matrices have one shape: before 0.19.8 stage 3 exchanges no others through gloo."""
    loss = trainer(models.features(step)).square().mean()
    trainer.backward(loss, retain_graph=True)
    trainer.backward(loss)


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(2, marks=stock.since("0.17.6", "Muon")),
        pytest.param(3, marks=stock.since("0.18.9", "Muon at ZeRO 3")),
    ],
)
def test_a_second_backward_is_right_or_refused(stage: int) -> None:
    options = Options(stage, "Linears", muon=True, **ALL_REDUCED)
    outcome = run(two_backwards, options, "zero3_retain")
    if stage == 3 and Version("0.19.8") <= RELEASE:
        assert not outcome.error
        assert outcome.difference < 0.05 * outcome.moved, outcome  # the iteration is in bf16
    else:
        assert outcome.error.startswith("Refused: a second backward"), outcome
