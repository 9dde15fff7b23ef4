"""What several patches ask of DeepSpeed's accelerator, which stands for the kind of device."""

from __future__ import annotations

from typing import Any


def accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def keeps_order() -> bool:
    """Return True if the device has no streams that have to wait for each other, as the CPU."""
    return bool(accelerator().resolves_data_dependency())


def wait_for_current(stream: Any) -> None:
    """Let `stream` wait for what is queued on the current one."""
    if not keeps_order():
        # Not told of which device, PyTorch asks the driver for all of them: 30 microseconds.
        device = getattr(stream, "device_index", None)
        stream.wait_stream(accelerator().current_stream(device))


def synchronize() -> None:
    """Let the host wait for all streams, where it is not always with them."""
    if not accelerator().is_synchronized_device():
        accelerator().synchronize()
