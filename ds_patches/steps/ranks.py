"""Flags that ranks reduce by a collective, and a rendezvous of ranks in the store."""

from __future__ import annotations

import hashlib
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


def rendezvous_key(subject: str, ranks: Sequence[int], rank: int) -> str:
    """Return a key in the store for the next rendezvous of these ranks over a subject.

    The store counts each rank's rendezvous. So the counts start again with the store of a new
    process group, in which some ranks may be new processes.
    """
    prefix = f"ds_patches/{subject}/{hashlib.sha256(repr((*ranks,)).encode()).hexdigest()[:16]}"
    return f"{prefix}/{agreement.store().add(f'{prefix}/{rank}', 1)}"


def wait_at_rendezvous(
    store: Any, key: str, ranks: Sequence[int], rank: int, timeout: float
) -> list[int]:
    """Wait in the store, up to `timeout` seconds. Return the ranks that did not arrive.

    Not a collective, because a rank that raised does not take part in collectives.
    """
    arrived = f"{key}/arrived"
    store.set(f"{key}/{rank}", "")
    store.add(arrived, 1)
    if agreement.wait(lambda: store.add(arrived, 0) >= len(ranks), timeout):
        return []
    return [other for other in ranks if not store.check([f"{key}/{other}"])]


def collective_timeout() -> float:
    """Return the timeout of the default group's collectives, in seconds."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d._get_default_group()
    return agreement.patience(group, accelerator().device_name())
