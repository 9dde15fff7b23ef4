"""Stage 3: gradients of several backwards add up in the partition buffer.

Each rank holds one flat slice per parameter. Stock copies into it or adds to it by a counter that
moves with the *forward* from 0.18.5 on, and never clears it: what an earlier step left there for
a parameter without a gradient stays. So before the second backward over one forward the slices
that this step has not written are zeroed, and from there on everything adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ds_patches.core.attributes import meanwhile

from .lost import LostGradients
from .upstream import stage3


class PartitionSum:
    """Which gradient partitions of one stage 3 optimizer hold gradients of the present step."""

    def __init__(self, optimizer: Any, lost: LostGradients) -> None:
        self._optimizer = optimizer
        self._lost = lost
        self._written: set[int] = set()  # ds_id
        self._adding = False

    def begin_backward(self) -> None:
        """The first backward over a forward: copy or add is upstream's choice."""
        self._adding = False

    def begin_backward_again(self) -> None:
        """A later backward over the same forward: whatever arrives is added."""
        self._zero_unwritten(stage3.gradient_partitions(self._optimizer))
        self._adding = True

    def drop(self) -> None:
        """``zero_grad()`` between two backwards: forget the step's gradients so far."""
        for partition in stage3.gradient_partitions(self._optimizer).values():
            partition.zero_()
        for gradient in stage3.offloaded_gradients(self._optimizer):
            gradient.zero_()
        stage3.offloaded_norms(self._optimizer).clear()
        self._written.update(stage3.gradient_partitions(self._optimizer))

    def abandon(self) -> None:
        """A backward raised: drop what waits in the buckets, and the step's gradients with it."""
        stage3.empty_buckets(self._optimizer)
        self._optimizer.averaged_gradients = {}
        for group in self._optimizer.fp16_groups:
            for param in group:
                param.grad = None
        self._optimizer.micro_step_id = 0
        self.drop()
        self.step_taken()

    def step_taken(self) -> None:
        """The optimizer has consumed the gradients."""
        self._written.clear()
        self._adding = False

    def partition(
        self, wrapped: Callable[..., Any], params: list[Any], gradients: list[Any]
    ) -> Any:
        """Stock's ``partition_grads``, made to add where it has to."""
        ids = {param.ds_id for param in params}
        micro_step_id = self._optimizer.micro_step_id
        overwrites = micro_step_id == 0 and not self._written.isdisjoint(ids)
        if overwrites and not self._adding:
            self._lost.warn()
        if not (self._adding or (overwrites and self._lost.accumulates)):
            self._written |= ids
            return wrapped(params, gradients)
        self._zero_unwritten(ids)
        # Above zero means "add" to every release; the value itself means nothing else there.
        with meanwhile(self._optimizer, micro_step_id=max(1, micro_step_id)):
            return wrapped(params, gradients)

    def _zero_unwritten(self, ids: Iterable[int]) -> None:
        partitions = stage3.gradient_partitions(self._optimizer)
        unwritten = set(ids) - self._written
        for ds_id in unwritten:
            partitions[ds_id].zero_()
        if unwritten:
            stage3.zero_offloaded(self._optimizer, unwritten)
        self._written |= unwritten
