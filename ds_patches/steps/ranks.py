"""What ranks tell each other by a collective: flags. See `core.agreement` for what needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

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
