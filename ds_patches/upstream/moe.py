"""The gates of DeepSpeed's MoE layer, 0.16.0 to 0.19.3, and the capacity of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_patches.core import live


def drops_tokens(flags: Sequence[Any], policy: Sequence[Any] = ()) -> bool:
    """Return True if a gate drops the least probable tokens, as it does by default."""
    return all(flags) and all(name == "probs" for name in policy)


@cache
def compares_logits() -> bool:
    """Return True if gates drop tokens by their logits, not their probabilities: to 0.18.9."""
    from deepspeed.moe import sharded_moe

    names = live.innermost(live.raw(sharded_moe, "topkgating")).__code__.co_varnames
    return "capacity_probs" in names


def comparable_logits(logits: Tensor) -> Tensor:
    """Return logits of the same probabilities that compare across tokens, and are positive.

    logits: tokens by experts.
    """
    log_probs = logits.log_softmax(dim=1)
    lowest = log_probs.detach().nan_to_num(neginf=0.0).min()
    return log_probs + (1.0 - lowest)


def capacity(logits: Tensor, factor: float, min_capacity: int) -> int:
    """Return the number of tokens that each expert takes."""
    from deepspeed.moe import sharded_moe

    return int(sharded_moe._capacity(logits, torch.tensor(factor), torch.tensor(min_capacity)))


def pad_to_capacity(gated: tuple[Any, ...], expert_capacity: int) -> tuple[Any, ...]:
    """Pad a gate's output to the capacity that the all-to-all exchanges."""
    balance, weights, dispatch, *rest = gated
    padding = (0, expert_capacity - weights.shape[2])
    pad = torch.nn.functional.pad
    return (balance, pad(weights, padding), pad(dispatch, padding), *rest)
