"""The gates of DeepSpeed's MoE layer, 0.16.0 to 0.19.3: how many tokens each expert takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_patches.core import live


def drops(given: Sequence[Any], policy: Sequence[Any] = ()) -> bool:
    """Return True if a gate drops the least probable tokens, as it does by default."""
    return all(given) and all(word == "probs" for word in policy)


@cache
def compares_logits() -> bool:
    """Return True if it does where it drops tokens, and not their probabilities: to 0.18.9."""
    from deepspeed.moe import sharded_moe

    names = live.innermost(live.raw(sharded_moe, "topkgating")).__code__.co_varnames
    return "capacity_probs" in names


def comparable(logits: Tensor) -> Tensor:
    """Return logits of the same probabilities: in their order over all tokens, and positive."""
    logs = logits.log_softmax(dim=1)
    least = logs.detach().nan_to_num(neginf=0.0).min()
    return logs + (1.0 - least)


def capacity(logits: Tensor, factor: float, least: int) -> int:
    """Return how many tokens an expert takes."""
    from deepspeed.moe import sharded_moe

    return int(sharded_moe._capacity(logits, torch.tensor(factor), torch.tensor(least)))


def padded(gated: tuple[Any, ...], takes: int) -> tuple[Any, ...]:
    """Pad a gate's output to the capacity that the all-to-all exchanges."""
    balance, weights, dispatch, *rest = gated
    more = (0, takes - weights.shape[2])
    pad = torch.nn.functional.pad
    return (balance, pad(weights, more), pad(dispatch, more), *rest)
