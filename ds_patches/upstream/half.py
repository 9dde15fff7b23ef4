"""The two optimizer wrappers of fp16, which partition nothing, and divide by a loss scale.

From 0.17.6 on DeepSpeed takes the one without fusion for bf16 without ZeRO, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.layer import layered


def is_bf16(optimizer: Any) -> bool:
    """Whether an engine's parameters are bf16, which needs no loss scale."""
    params = (param for group in optimizer.fp16_groups for param in group)
    return any(str(param.dtype) == "torch.bfloat16" for param in params)


def unscaled(optimizer: Any) -> AbstractContextManager[None]:
    """Let it have no loss scale inside, if its parameters are bf16."""
    if not is_bf16(optimizer):
        return nullcontext()
    return meanwhile(optimizer, dynamic_loss_scale=False, cur_scale=1.0)


def scales_losses(engine: Any) -> bool:
    """Whether the engine's optimizer divides by a scale, rather than PyTorch's GradScaler."""
    return bool(engine.fp16_enabled() and engine.torch_autocast_z0_gradscaler is None)


@contextmanager
def rising_last(optimizer: Any) -> Iterator[None]:
    """Let a scale that rises in a step rise at its end: gradients are still divided by the old one.

    A scale that falls is that of a step that is skipped.
    """
    rises: list[Wrapped] = []

    def update(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if in_order(wrapped, args, kwargs)[0]:
            wrapped(*args, **kwargs)
        else:
            rises.append(wrapped)

    with layered(optimizer, _update_scale=update):
        yield
    for update_scale in rises:
        update_scale(False)


def unscale_norm(optimizer: Any, scale: float) -> None:
    """Let the norm that the engine tells be that of gradients that were divided by `scale`."""
    optimizer._global_grad_norm /= scale
