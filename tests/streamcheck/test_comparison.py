"""Two runs that are equal to the bit, and two that are not."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from ds_patches.streamcheck import lanes
from ds_patches.streamcheck.comparison import first_difference
from ds_patches.streamcheck.training import Quantity, Training
from tests.streamcheck.small import CPU, WORK


def runs() -> tuple[list[Quantity], list[Quantity]]:
    training = Training(WORK, CPU)
    return training.run(lanes.plain(CPU)), training.run(lanes.plain(CPU))


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (1, "the output of micro batch 2"),
        (2, "the gradient of layer 3's weight"),
        (2, "layer 8's bias after the step"),
    ],
)
def test_the_first_difference_is_named(batch: int, name: str) -> None:
    expected, found = runs()
    assert not first_difference(expected, found)
    (place,) = (i for i, q in enumerate(found) if (q.batch, q.name) == (batch, name))
    for quantity in found[place:]:
        quantity.value.view(-1)[0] += 0.5
    said = first_difference(expected, found)
    count = found[place].value.numel()
    assert said == f"{name} in batch {batch}, by 0.5 in 1 of {count} numbers"


@pytest.mark.parametrize(
    ("expected", "found", "apart"),
    [
        (1.0, 1.0 + 2**-23, "1.2e-07"),
        (0.0, -0.0, "0"),
        (1.0, nan, "nan"),
        (1.0, inf, "inf"),
        (nan, nan, None),
    ],
)
def test_to_the_bit(expected: float, found: float, apart: str | None) -> None:
    one, other = ([Quantity(1, "it", torch.tensor([7.0, value]))] for value in (expected, found))
    said = f"it in batch 1, by {apart} in 1 of 2 numbers" if apart else ""
    assert first_difference(one, other) == said
