"""The streams that gradients are reduced on, and parameters gathered on, beside the backward's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds_patches.core import live
from ds_patches.upstream.accelerator import keeps_order, wait_for_current
from ds_patches.upstream.kinds import is_zero12
from ds_patches.upstream.places import private

# --- Stages 1 and 2 -------------------------------------------------------------------------------

#: What a parameter's hook calls: its gradient goes into a bucket.
GRADIENT_METHOD = "reduce_independent_p_g_buckets_and_remove_grads"


def overlap(optimizer: Any) -> bool:
    """Whether an optimizer of stages 1 and 2 reduces beside the backward, on a stream of its own.

    Not where the device has none, as the CPU.
    """
    overlaps = getattr(optimizer, "overlap_comm", False) and is_zero12(optimizer)
    return bool(overlaps) and not keeps_order()


def producers(optimizer: Any) -> list[set[Any]]:
    """Return for each bucket the streams that what is in it came from; none before 0.19.3.

    The reduction waits for all of these. They are the buckets' own, and change with them.
    """
    return [one.copy_streams for one in _buckets(optimizer) if hasattr(one, "copy_streams")]


def buckets_turned_back(optimizer: Any) -> list[Any]:
    """Return the buckets that begin anew in their first buffer, which may be being reduced.

    All of 0.17.2 to 0.18.4.
    """
    return [
        bucket
        for bucket in _buckets(optimizer)
        if "index" in live.innermost(type(bucket).clear).__code__.co_names
    ]


def _buckets(optimizer: Any) -> Iterable[Any]:
    """Return the reduce buckets; none before 0.17.2."""
    return getattr(optimizer, "ipg_buckets", {}).values()


# --- Stage 3 --------------------------------------------------------------------------------------


def reduction_waits(optimizer: Any) -> None:
    """Let the stream that reduces wait for the one that the backward is on."""
    wait_for_current(optimizer.reduce_and_partition_stream)


def gather_waits(optimizer: Any) -> None:
    """Let the stream that gathers wait for the one that the optimizer has stepped on."""
    offload = optimizer.parameter_offload
    wait_for_current(private(offload, "DeepSpeedZeRoOffload", "allgather_stream"))
