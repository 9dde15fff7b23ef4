"""Whether two runs are the same to the bit, and what differed first if they are not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ds_patches.streamcheck.training import Quantity


def first_difference(expected: Iterable[Quantity], found: Iterable[Quantity]) -> str:
    """Name the first quantity that differs, where and by how much; nothing if none does."""
    for ours, theirs in zip(expected, found, strict=True):
        differs = _bits(ours.value) != _bits(theirs.value)
        count = int(differs.sum())
        if count:
            apart = (ours.value.double() - theirs.value.double()).abs().max().item()
            numbers = f"{count} of {differs.numel()} numbers"
            return f"{theirs.name} in batch {theirs.batch}, by {apart:.2g} in {numbers}"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """As integers NaN equals NaN, and 0 is not -0."""
    return tensor.view(torch.int32)
