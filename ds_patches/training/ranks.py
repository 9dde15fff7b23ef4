"""What ranks tell each other without a collective, as one that raised takes part in none."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ds_patches.core.agreement import store
from ds_patches.upstream.accelerator import accelerator


def patience() -> float:
    """Seconds that a collective of the default group would wait."""
    import torch
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    device = torch.device(accelerator().device_name())
    timeout = group._get_backend(device).options._timeout
    return float(timeout.total_seconds())


def come(key: str, rank: int, ranks: Sequence[int]) -> list[int]:
    """Say that this rank has come to `key`, and wait for the others; return those that do not."""
    here = store()
    here.set(f"{key}/{rank}", "come")
    try:
        here.wait([f"{key}/{one}" for one in ranks], timedelta(seconds=patience()))
    except RuntimeError:  # DistStoreError: the time is over
        return [one for one in ranks if not here.check([f"{key}/{one}"])]
    return []
