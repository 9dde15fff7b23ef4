"""The gradients a plain PyTorch model gets from the same weights and the same batches."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from demo.data import Digits
from demo.model import TwoHeads, digit_loss, pixel_loss


def difference(engine: Any, plain: TwoHeads, batch: Digits) -> float:
    """Largest difference of any gradient entry, relative to the largest entry; NaN if any is.

    Call it between the last backward and the step, on every rank with its own batch.
    """
    _copy_weights(engine, plain)
    _backward(plain, batch)
    worst, largest = torch.zeros(()), torch.zeros(())
    for partitioned, mine in _pairs(engine, plain):
        worst = torch.maximum(worst, (_full_gradient(partitioned) - mine.grad).abs().max())
        largest = torch.maximum(largest, mine.grad.abs().max())
    return float(worst / largest)


def _copy_weights(engine: Any, plain: TwoHeads) -> None:
    for partitioned, mine in _pairs(engine, plain):
        with deepspeed.zero.GatheredParameters([partitioned]), torch.no_grad():
            mine.copy_(partitioned)


def _backward(plain: TwoHeads, batch: Digits) -> None:
    """Both losses, averaged over the ranks as data parallel training does."""
    plain.zero_grad()
    logits, pixels = plain(batch.images)
    digit_loss(logits, batch.labels).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    pixel_loss(pixels, batch.images).backward()  # type: ignore[no-untyped-call]
    for mine in plain.parameters():
        assert mine.grad is not None  # every parameter is in one of the losses
        dist.all_reduce(mine.grad)
        mine.grad /= dist.get_world_size()


def _full_gradient(partitioned: Any) -> Any:
    gradient = safe_get_full_grad(partitioned)
    if gradient is None:
        raise RuntimeError("a parameter has no gradient after both backwards")
    return gradient


def _pairs(engine: Any, plain: TwoHeads) -> Any:
    return zip(engine.module.parameters(), plain.parameters(), strict=True)
