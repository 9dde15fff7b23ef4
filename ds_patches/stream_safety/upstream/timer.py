"""The throughput timer, which waits for the device when it starts and when it stops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ds_patches.runtime.attributes import meanwhile


def waits_for_nothing(timer: Any) -> AbstractContextManager[None]:
    """As ``"timers": {"throughput": {"synchronized": false}}`` has it, while this is open."""
    return meanwhile(timer.config, synchronized=False)
