"""Gradients on the parameters of one optimizer, where autograd has added them up, and their end.

DeepSpeed's own reducer leaves out what has no gradient, so ranks that differ in what they have
would wait for each other in different collectives: parameters without one then take part with
zeros. Our own reduce-scatter always does so.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from ds_patches.accumulation.flat_sum import FlatSum as StepSum
from ds_patches.accumulation.upstream import flat as accumulated
from ds_patches.accumulation.upstream import stage3 as partitions

from .flat_reduction import Flush
from .upstream import flat, flat_layout, gathers, stage3


class LocalSum(ABC):
    """What there is to do with the gradients on the parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def is_empty(self) -> bool:
        """Whether no parameter has one."""
        return not any(self._present())

    def prepare(self) -> int:
        """Do what may fail on one rank alone.

        Returns 24 bits that are equal on all ranks if they have gradients of the same parameters,
        or if that makes no difference.
        """
        return zlib.crc32(bytes(self._present())) & 0xFFFFFF

    @abstractmethod
    def reduce(self, uneven: bool) -> None:
        """Add to what the step has reduced, and clear. A collective, after `prepare`.

        uneven: ranks have gradients of different parameters, or may have.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget them, and leave the optimizer as it is before a backward."""

    @abstractmethod
    def _present(self) -> list[bool]:
        """Whether each parameter has one."""


class FlatSum(LocalSum):
    """Stages 1 and 2, by DeepSpeed's own reducer."""

    def prepare(self) -> int:
        flat.bring_to_sums(self._optimizer)
        return super().prepare()

    def reduce(self, uneven: bool) -> None:
        if uneven:
            for _, param in flat.parameters(self._optimizer):
                if flat.gradient(self._optimizer, param) is None:
                    accumulated.give_zero_gradient(self._optimizer, param)
        flat.reduce(self._optimizer)

    def drop(self) -> None:
        flat.drop(self._optimizer)

    def _present(self) -> list[bool]:
        params = flat.parameters(self._optimizer)
        return [flat.gradient(self._optimizer, param) is not None for _, param in params]


class ScatteredSum(FlatSum):
    """The same past DeepSpeed's own reducer: only half of an all-reduce's bytes are sent."""

    _flush: Flush | None = None

    def __init__(self, optimizer: Any, step: StepSum) -> None:
        super().__init__(optimizer)
        self._step = step

    def prepare(self) -> int:
        if self._step.is_pending:  # micro steps that only DeepSpeed's own can add to
            return super().prepare()
        flat.bring_to_sums(self._optimizer)
        self._flush = Flush(flat_layout.layout(self._optimizer))
        return 0

    def reduce(self, uneven: bool) -> None:
        flush, self._flush = self._flush, None
        if flush is None:
            super().reduce(uneven)
            return
        flush.reduce()
        self._step.deliver(partial(flat_layout.deliver, self._optimizer, flush.layout))


class PartitionedSum(LocalSum):
    """Stage 3, by DeepSpeed's own reducer."""

    def reduce(self, uneven: bool) -> None:
        if uneven:
            for param in stage3.parameters(self._optimizer):
                if param.grad is None:
                    stage3.give_zeros(param)
        stage3.reduce(self._optimizer)

    def drop(self) -> None:
        partitions.clear(self._optimizer)
        # Nothing waits there, but 0.17.2 never begins anew to count what a bucket holds. Full is
        # when to reduce: ranks must count alike, also after one of them alone has raised.
        partitions.empty_buckets(self._optimizer)
        partitions.partition_parameters(self._optimizer)
        gathers.reset(self._optimizer.parameter_offload)

    def _present(self) -> list[bool]:
        return [param.grad is not None for param in stage3.parameters(self._optimizer)]
