"""Data parallel groups that are smaller than the world, and strided in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

#: Of four ranks. Rank 1 of the first group is rank 2 of the world: neither can pass for the other.
DATA, MODEL = ([0, 2], [1, 3]), ([0, 1], [2, 3])


class Grid:
    """What DeepSpeed asks a model parallel program for, which here computes nothing together."""

    def __init__(self) -> None:
        self._data, self._data_ranks = _mine(DATA)
        self._model, _ = _mine(MODEL)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._data_ranks

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)


def _mine(groups: tuple[list[int], ...]) -> tuple[Any, list[int]]:
    """This rank's group; all ranks make all groups."""
    made = [(dist.new_group(ranks), ranks) for ranks in groups]
    return next((group, ranks) for group, ranks in made if dist.get_rank() in ranks)


@cache
def grid() -> Grid | None:
    """The one of this process; none where all ranks train together."""
    return Grid() if dist.get_world_size() > 2 else None
