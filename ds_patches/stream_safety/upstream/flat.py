"""The optimizer of ZeRO stages 1 and 2, and the buffers of its buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_patches.runtime import engines
from ds_patches.runtime.attributes import meanwhile
from ds_patches.runtime.device import accelerator, keeps_order

from ..buffers import Buffers
from ..order import Order

#: What a parameter's hook calls: its gradient goes into a bucket.
GRADIENT_METHOD = "reduce_independent_p_g_buckets_and_remove_grads"


def optimizer_class() -> type:
    """Of stages 1 and 2."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    found: type = DeepSpeedZeroOptimizer
    return found


def order_of(optimizer: Any) -> Order | None:
    """None where nothing overlaps, where the device keeps order, and for ZenFlow's optimizers."""
    if (
        not getattr(optimizer, "overlap_comm", False)
        or keeps_order()
        or getattr(optimizer, "zenflow", False)
    ):
        return None
    return Order(accelerator(), optimizer.reduction_stream)


def has_waits_of_its_own(optimizer: Any) -> bool:
    """With CPU offload, where the host has a part, and for gradients that are not contiguous."""
    return bool(optimizer.cpu_offload or not optimizer.contiguous_gradients)


def producers(optimizer: Any) -> list[Any]:
    """The streams that what is in the buckets came from, where DeepSpeed keeps them: 0.19.3."""
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return [stream for bucket in buckets for stream in getattr(bucket, "copy_streams", ())]


def may_be_touched(param: torch.Tensor) -> bool:
    """Whether a hook of the program's may come to the gradient after DeepSpeed's."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)  # torch 2.1
    return hooks is not None and len(hooks) > 1


def watch(optimizer: Any, order: Order, spare: int) -> None:
    """Have its buffers see who takes them. spare: how many more each bucket may have."""
    for holder, name in _places(optimizer):
        buffers = getattr(holder, name)
        if type(buffers) is list:
            setattr(holder, name, Buffers(buffers, order, spare))


def watched(optimizer: Any) -> Iterator[Buffers]:
    """Those that do."""
    held = (getattr(holder, name) for holder, name in _places(optimizer))
    return (buffers for buffers in held if isinstance(buffers, Buffers))


def is_buffer(optimizer: Any, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a part of a buffer that a bucket has now."""
    if tensor.numel() > optimizer.reduce_bucket_size:  # and so larger than any
        return False
    now = [buffer for holder, name in _places(optimizer) for buffer in getattr(holder, name) or ()]
    if any(buffer is tensor._base for buffer in now):  # as a rule, and soon seen
        return True
    memory = tensor.untyped_storage().data_ptr()
    return any(buffer.untyped_storage().data_ptr() == memory for buffer in now)


def buffers(optimizer: Any) -> list[torch.Tensor]:
    """All of them."""
    held = (getattr(holder, name) or [] for holder, name in _places(optimizer))
    return [buffer for some in held for buffer in Buffers.all_of(some)]


def nothing_overlaps(optimizer: Any) -> AbstractContextManager[None]:
    """Tell the end of a backward so, where the host waits if anything does."""
    return meanwhile(optimizer, overlap_comm=False)


def adds_up(optimizer: Any) -> bool:
    """Whether a micro step that is reduced is added to others, and no step follows it."""
    return bool(optimizer.partition_gradients) and not engines.at_boundary(optimizer)


def unwatch(optimizer: Any) -> None:
    """Put plain lists back."""
    for holder, name in _places(optimizer):
        buffers = getattr(holder, name)
        if isinstance(buffers, Buffers):
            setattr(holder, name, buffers.plain())


def _places(optimizer: Any) -> list[tuple[Any, str]]:
    """Where the buffers are: from 0.17.2 on in a bucket for each dtype, before that in one."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is not None:
        return [(bucket, "buffer") for bucket in buckets.values()]
    return [(optimizer, "ipg_buffer")] if hasattr(optimizer, "ipg_buffer") else []
