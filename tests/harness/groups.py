"""Engines that train with some ranks of the world only: an `mpu` tells DeepSpeed who they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch.distributed as dist

Ranks = Sequence[Sequence[int]]

#: Of four ranks. Rank 1 of the first group is rank 2 of the world: neither can pass for the other.
DATA, MODEL = ([0, 2], [1, 3]), ([0, 1], [2, 3])


class Parallel:
    """An `mpu` for DeepSpeed. Ranks of a `model` group compute nothing together here.

    Without one each rank is a group of its own. The ranks of `sequence` have parts of one sequence;
    then ZeRO is over all of the world.
    """

    def __init__(self, data: Ranks, model: Ranks | None = None, sequence: Ranks = ()) -> None:
        self.data = group_of(data)
        self._answer("data_parallel", self.data)
        everyone = model or [[rank] for rank in range(dist.get_world_size())]
        self._answer("model_parallel", group_of(everyone))
        if sequence:
            self._answer("sequence_parallel", group_of(sequence))
            self._answer("sequence_data_parallel", dist.group.WORLD)

    def _answer(self, kind: str, group: Any) -> None:
        """As methods, whose names are upstream's."""
        setattr(self, f"get_{kind}_group", lambda: group)
        setattr(self, f"get_{kind}_group_ranks", partial(dist.get_process_group_ranks, group))
        setattr(self, f"get_{kind}_world_size", partial(dist.get_world_size, group))
        setattr(self, f"get_{kind}_rank", partial(dist.get_rank, group))


@contextmanager
def parallel(data: Ranks, sequence: Ranks = ()) -> Iterator[Parallel]:
    """For engines that are built in the block; DeepSpeed keeps it in a module, for all of them."""
    from deepspeed.utils import groups

    with mock.patch.object(groups, "mpu", groups.mpu):
        yield Parallel(data, sequence=sequence)


def group_of(everyone: Ranks) -> Any:
    """The one with this rank; all ranks make all groups."""
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in everyone}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


@cache
def grid() -> Parallel:
    """Four ranks as two groups of two; made once, as groups of a process are for good."""
    return Parallel(DATA, MODEL)
