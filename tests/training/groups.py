"""Engines that train with some ranks of the world only: an `mpu` tells DeepSpeed who they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

Ranks = Sequence[Sequence[int]]

#: Of four ranks. Rank 1 of the first group is rank 2 of the world: neither can pass for the other.
DATA, MODEL = ([0, 2], [1, 3]), ([0, 1], [2, 3])


class Parallel:
    """What DeepSpeed asks of an `mpu`. Ranks of a `model` group compute nothing together here.

    Without one each rank is a group of its own.
    """

    def __init__(self, data: Ranks, model: Ranks | None = None) -> None:
        self.data = group_of(data)
        self.model = group_of(model or [[rank] for rank in range(dist.get_world_size())])

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)


class SequenceParallel(Parallel):
    """The ranks of `sequence` have parts of one sequence, and ZeRO is over all of the world."""

    def __init__(self, data: Ranks, sequence: Ranks) -> None:
        super().__init__(data)
        self.sequence = group_of(sequence)

    def get_sequence_parallel_group(self) -> Any:
        return self.sequence

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self.sequence)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self.sequence)

    def get_sequence_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()


@contextmanager
def parallel(data: Ranks, sequence: Ranks | None = None) -> Iterator[Parallel]:
    """For engines that are built in the block; DeepSpeed keeps it in a module, for all of them."""
    from deepspeed.utils import groups

    before = groups.mpu
    try:
        yield Parallel(data) if sequence is None else SequenceParallel(data, sequence)
    finally:
        groups.mpu = before


def group_of(everyone: Ranks) -> Any:
    """The one with this rank; all ranks make all groups."""
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in everyone}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


@cache
def grid() -> Parallel:
    """Four ranks as two groups of two; made once, as groups of a process are for good."""
    return Parallel(DATA, MODEL)
