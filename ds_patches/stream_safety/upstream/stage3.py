"""The optimizer of ZeRO stage 3."""

from __future__ import annotations

from typing import Any

from . import streams


def reduction_waits(optimizer: Any) -> None:
    """Let the stream that reduces wait for the one that the backward is on."""
    _waits(optimizer.reduce_and_partition_stream)


def gather_waits(optimizer: Any) -> None:
    """Let the stream that gathers wait for the one that the optimizer has stepped on."""
    _waits(optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream)


def _waits(stream: Any) -> None:
    if not streams.keeps_order():
        stream.wait_stream(streams.accelerator().current_stream())
