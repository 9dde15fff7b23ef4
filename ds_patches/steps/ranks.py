"""What ranks tell each other: flags, and without a collective that they have come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.agreement import store
from ds_patches.upstream.accelerator import accelerator


def on_any(flags: Sequence[bool], group: Any) -> torch.Tensor:
    """Return int32 flags on the device: 1 where one is true on any rank of a group. A collective.

    Nobody waits for the others before it is read.
    """
    as_told = {"dtype": torch.int32, "device": accelerator().current_device_name()}
    # To copy a list to a device waits for all that the device has to do.
    told = torch.ones(len(flags), **as_told) if all(flags) else torch.tensor(flags, **as_told)
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return told


def patience() -> float:
    """Seconds that a collective of the default group would wait."""
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    device = torch.device(accelerator().device_name())
    timeout = group._get_backend(device).options._timeout
    return float(timeout.total_seconds())


def come(key: str, rank: int, ranks: Sequence[int]) -> list[int]:
    """Say that this rank has come to `key`, and wait for the others; return those that do not.

    Not by a collective, as a rank that raised takes part in none.
    """
    here = store()
    here.set(f"{key}/{rank}", "come")
    try:
        here.wait([f"{key}/{one}" for one in ranks], timedelta(seconds=patience()))
    except RuntimeError:  # DistStoreError: the time is over
        return [one for one in ranks if not here.check([f"{key}/{one}"])]
    return []
