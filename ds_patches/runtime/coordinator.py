"""What DeepSpeed's coordinator of stage 3 parameters keeps to itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds_patches.runtime.device import accelerator, keeps_order


def private_name(name: str) -> str:
    """What `name`, written with two underscores in the coordinator's class, is called outside."""
    return "_PartitionedParameterCoordinator__" + name


def private(coordinator: Any, name: str) -> Any:
    """That attribute."""
    return getattr(coordinator, private_name(name))


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Parameters whose gather was begun and nobody has waited for, and what to wait for."""
    found: dict[Any, Any] = private(coordinator, "inflight_param_registry")
    return found


def arrive(coordinator: Any, params: Iterable[Any]) -> None:
    """Wait for the gathers of these, on the stream of the gathers."""
    pending = in_flight(coordinator)
    with accelerator().stream(private(coordinator, "allgather_stream")):
        for param in params:
            pending.pop(param).wait()


def after_gathers(coordinator: Any) -> None:
    """What the current stream does next comes after those that arrived."""
    if not keeps_order():
        accelerator().current_stream().wait_stream(private(coordinator, "allgather_stream"))
