"""Data parallel groups that are smaller than the world, and strided in it."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from tests.groups import Parallel

#: Of four ranks. Rank 1 of the first group is rank 2 of the world: neither can pass for the other.
DATA, MODEL = ([0, 2], [1, 3]), ([0, 1], [2, 3])


@cache
def grid() -> Parallel | None:
    """The one of this process; none where all ranks train together."""
    return Parallel(DATA, MODEL) if dist.get_world_size() > 2 else None
