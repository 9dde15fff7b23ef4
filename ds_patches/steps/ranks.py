"""What ranks tell each other: flags, by a collective; and by none, that they are at a place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import agreement
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


def meeting(subject: str, ranks: Sequence[int], me: int) -> str:
    """Return a place in the store where these ranks meet: for each, their next over a subject.

    The store itself counts, so that the ranks of a process group that was built anew, some of them
    in new processes, begin anew.
    """
    place = f"ds_patches/{subject}/{hashlib.sha256(repr((*ranks,)).encode()).hexdigest()[:16]}"
    return f"{place}/{agreement.store().add(f'{place}/{me}', 1)}"


def come(store: Any, place: str, ranks: Sequence[int], me: int, patience: float) -> list[int]:
    """Wait at a place in the store; return the ranks that did not arrive in time.

    Not by a collective, as a rank that raised takes part in none.
    """
    came = f"{place}/came"
    store.set(f"{place}/{me}", "")
    store.add(came, 1)
    if agreement.wait(lambda: store.add(came, 0) >= len(ranks), patience):
        return []
    return [rank for rank in ranks if not store.check([f"{place}/{rank}"])]


def patience() -> float:
    """Seconds that a collective of the default group would wait."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d._get_default_group()
    return agreement.patience(group, accelerator().device_name())
