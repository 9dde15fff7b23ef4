"""The optimizer of ZeRO stage 3."""

from __future__ import annotations

from typing import Any

from ds_patches.runtime.device import wait_for_current


def reduction_waits(optimizer: Any) -> None:
    """Let the stream that reduces wait for the one that the backward is on."""
    wait_for_current(optimizer.reduce_and_partition_stream)


def gather_waits(optimizer: Any) -> None:
    """Let the stream that gathers wait for the one that the optimizer has stepped on."""
    wait_for_current(optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream)
