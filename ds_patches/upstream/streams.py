"""The streams that gradients are reduced on, and parameters gathered on, beside the backward's."""

from __future__ import annotations

from typing import Any

import torch

from ds_patches.core.calls import private
from ds_patches.upstream.accelerator import keeps_order, wait_for_current
from ds_patches.upstream.kinds import is_zero12

# --- Stages 1 and 2 -------------------------------------------------------------------------------

#: What a parameter's hook calls: its gradient goes into a bucket.
GRADIENT_METHOD = "reduce_independent_p_g_buckets_and_remove_grads"


def overlap(optimizer: Any) -> bool:
    """Whether an optimizer of stages 1 and 2 reduces beside the backward, on a stream of its own.

    Not where the device has none, as the CPU.
    """
    overlaps = getattr(optimizer, "overlap_comm", False) and is_zero12(optimizer)
    return bool(overlaps) and not keeps_order()


def wait_for_all(optimizer: Any) -> bool:
    """Whether the reduction waits for every stream that filled a bucket: 0.19.3 and later."""
    return any(hasattr(bucket, "copy_streams") for bucket in _buckets(optimizer))


def producers(optimizer: Any) -> list[Any]:
    """Return the streams that what is in the buckets came from, where `wait_for_all`."""
    found = (getattr(bucket, "copy_streams", ()) for bucket in _buckets(optimizer))
    return [stream for streams in found for stream in streams]


def is_buffer(optimizer: Any, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a part of a buffer that a bucket has now."""
    if tensor.numel() > optimizer.reduce_bucket_size:  # and so larger than any
        return False
    # From 0.17.2 on each bucket holds a list of buffers, before that the optimizer does.
    held = [getattr(optimizer, "ipg_buffer", None), *(one.buffer for one in _buckets(optimizer))]
    now = [buffer for buffers in held for buffer in buffers or ()]
    if any(buffer is tensor._base for buffer in now):  # as a rule, and soon seen
        return True
    memory = tensor.untyped_storage().data_ptr()
    return any(buffer.untyped_storage().data_ptr() == memory for buffer in now)


def _buckets(optimizer: Any) -> list[Any]:
    """One for each dtype, from 0.17.2 on; before that there are none."""
    return [*getattr(optimizer, "ipg_buckets", {}).values()]


# --- Stage 3 --------------------------------------------------------------------------------------


def reduction_waits(optimizer: Any) -> None:
    """Let the stream that reduces wait for the one that the backward is on."""
    wait_for_current(optimizer.reduce_and_partition_stream)


def gather_waits(optimizer: Any) -> None:
    """Let the stream that gathers wait for the one that the optimizer has stepped on."""
    offload = optimizer.parameter_offload
    wait_for_current(private(offload, "DeepSpeedZeRoOffload", "allgather_stream"))
