"""The optimizer of ZeRO stage 3."""

from __future__ import annotations

from typing import Any

from . import streams


def wait_for_current(optimizer: Any) -> None:
    """Let the stream that reduces wait for the one that the backward is on."""
    if not streams.keeps_order():
        current = streams.accelerator().current_stream()
        optimizer.reduce_and_partition_stream.wait_stream(current)
