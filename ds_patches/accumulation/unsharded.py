"""bf16 without ZeRO, where DeepSpeed takes its optimizer wrapper of fp16 for it.

bf16 needs no loss scale, and the engine, which thinks of another wrapper, clears no gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_patches.runtime.attributes import Args, Kwargs, Wrapped, meanwhile


def around_backward(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Up to 0.18.2 it multiplies the loss by the scale."""
    if not _is_bf16(optimizer):
        return wrapped(*args, **kwargs)
    with meanwhile(optimizer, dynamic_loss_scale=False, cur_scale=1.0):
        return wrapped(*args, **kwargs)


def around_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """It divides by the scale."""
    result = around_backward(wrapped, optimizer, args, kwargs)
    if _is_bf16(optimizer):
        optimizer.zero_grad()
    return result


def _is_bf16(optimizer: Any) -> bool:
    params = (param for group in optimizer.fp16_groups for param in group)
    return any(param.dtype == torch.bfloat16 for param in params)
