"""DeepSpeed's word for the device and its streams."""

from __future__ import annotations

from typing import Any


def accelerator() -> Any:
    """It stands for the kind of device."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def keeps_order() -> bool:
    """Whether the device has no streams that would have to wait for each other, as the CPU."""
    return bool(accelerator().resolves_data_dependency())
