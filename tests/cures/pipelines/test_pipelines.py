"""Pipelines: every stage moves as plain PyTorch does over the whole batch."""

from itertools import product
from typing import Any

import pytest

from tests.harness.pipelines import Pipeline, run, train, train_and_evaluate
from tests.harness.stock import RELEASE, Version
from tests.world import World, on_ranks

#: All stages move micro-steps times as far; stages before the last 1 / micro-steps as far.
ADDS_UP = Version("0.18.2") >= RELEASE
DIVIDES_AGAIN = Version("0.18.3") <= RELEASE <= Version("0.19.2")


#: Half precision without ZeRO has a patch of its own.
PATCHES = ("half_without_zero", *(("pipelines",) if ADDS_UP or DIVIDES_AGAIN else ()))


def holds(options: Pipeline, script: Any = train) -> None:
    outcome = run(options, *PATCHES, script=script)
    assert outcome.equal, outcome
    assert outcome.losses == pytest.approx(outcome.expected, abs=2e-3)
    assert not outcome.said or (ADDS_UP and options.micro_steps > 1)
    assert all("learning rate" in text for text in outcome.said)


KINDS: list[dict[str, Any]] = [{}, {"stages": 1}, {"micro_steps": 1}, {"dtype": "bfloat16"}]
KINDS.append({"pair": True})


@on_ranks
@pytest.mark.core_case(zero=0, more={})
@pytest.mark.core_case(zero=1, more={"stages": 1})
@pytest.mark.core_case(zero=0, more={"dtype": "bfloat16"})
@pytest.mark.core_case(zero=1, more={"dtype": "float16"})
@pytest.mark.parametrize(
    ("zero", "more"),
    [
        *product((0, 1), KINDS),
        (0, {"stages": 1, "micro_steps": 1}),
        (0, {"stages": 1, "dtype": "bfloat16"}),
        (1, {"dtype": "bfloat16", "sums": "fp32"}),
        (1, {"dtype": "float16"}),
        (1, {"clip": 0.5}),
    ],
    ids=str,
)
def test_patched(zero: int, more: dict[str, Any]) -> None:
    holds(Pipeline(zero, **more))


@on_ranks
@pytest.mark.core_case
def test_with_evaluations() -> None:
    holds(Pipeline(), train_and_evaluate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_four_ranks(four: World, zero: int, stages: int) -> None:
    """Stock divides the first of four stages three times too often."""
    four.run(holds, Pipeline(zero, stages=stages))
