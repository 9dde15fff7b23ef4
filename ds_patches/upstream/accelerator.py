"""DeepSpeed's accelerator: its streams, and waits between them."""

from typing import Any


def accelerator() -> Any:
    """Return DeepSpeed's accelerator object for the kind of device in use."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def is_single_stream() -> bool:
    """Return True if the device runs all work in order, without streams, as the CPU."""
    return bool(accelerator().resolves_data_dependency())


def wait_for_current(stream: Any) -> None:
    """Make `stream` wait for the current stream."""
    if not is_single_stream():
        # Without a device index PyTorch queries the driver for every device: 30 microseconds.
        device = getattr(stream, "device_index", None)
        stream.wait_stream(accelerator().current_stream(device))


def synchronize() -> None:
    """Make the host wait for all streams, on devices that run asynchronously."""
    if not accelerator().is_synchronized_device():
        accelerator().synchronize()
