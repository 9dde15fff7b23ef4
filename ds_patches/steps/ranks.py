"""Flags and numbers that ranks compare by a collective, and a rendezvous in the store."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.upstream.accelerator import accelerator


def any_rank(flags: Sequence[bool], group: Any) -> torch.Tensor:
    """Return, for each flag, whether it is True on any rank of the group. Collective.

    An int32 tensor on the device, of 1 and 0. Asynchronous on a device: the host waits for the
    other ranks when it reads the flags.
    """
    options = {"dtype": torch.int32, "device": accelerator().current_device_name()}
    # A copy from the host waits until the device has done all of its queued work.
    on_any = torch.ones(len(flags), **options) if all(flags) else torch.tensor(flags, **options)
    dist.all_reduce(on_any, op=dist.ReduceOp.MAX, group=group)
    return on_any


def same_on_all_ranks(number: int, group: Any) -> bool:
    """Return True if a number of up to 63 bits is the same on all ranks. Collective."""
    bounds = torch.tensor([number, -number], device=accelerator().current_device_name())
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = bounds.tolist()
    return bool(highest == -lowest)


def absent_ranks(subject: str) -> list[int]:
    """Wait in the store for all ranks. Return those that do not arrive within the timeout.

    Not a collective, because a rank that raised does not take part in collectives. The store counts
    each rank's calls, so the counts start again with the store of a new process group, in which
    some ranks may be new processes.
    """
    store, rank, ranks = agreement.store(), dist.get_rank(), range(dist.get_world_size())
    prefix = f"ds_patches/{subject}"
    count = store.add(f"{prefix}/{rank}", 1)
    keys = {other: f"{prefix}/{other}/{count}" for other in ranks}
    store.set(keys[rank], "")
    if agreement.wait(lambda: store.check([*keys.values()]), collective_timeout()):
        return []
    return [other for other, key in keys.items() if not store.check([key])]


def collective_timeout() -> float:
    """Return the timeout of the default group's collectives, in seconds."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d._get_default_group()
    return agreement.patience(group, accelerator().device_name())
