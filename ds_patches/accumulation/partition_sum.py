"""Stage 3: gradients of the backwards of a step add up in the partition buffer.

Each rank holds one flat slice per parameter. Stock copies into it or adds to it by a counter that
moves with the *forward* from 0.18.5 on, and never clears it: what an earlier step left there for
a parameter without a gradient stays, and is stepped with. Here a slice is copied into when its
step writes it first, added to from then on, and zeroed if its step has not written it at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_patches.core import live
from ds_patches.runtime import engines
from ds_patches.runtime.attached import key_of
from ds_patches.runtime.attributes import meanwhile

from .gradient_sum import GradientSum
from .upstream import stage3

_KEY = key_of("accumulation")


def around_partition_grads(
    wrapped: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Of the stage 3 optimizer."""
    steps = vars(optimizer).get(_KEY)
    if steps is None or not isinstance(steps.sum, PartitionSum):
        return wrapped(*args, **kwargs)
    return steps.sum.partition(wrapped, *args, **kwargs)


class PartitionSum(GradientSum):
    """Which gradient partitions of one stage 3 optimizer hold gradients of the present step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._written: set[int] = set()  # ds_id
        self._delivered: set[int] = set()  # of them, those that reached an offloaded optimizer

    def partition(
        self, wrapped: Callable[..., Any], params: list[Any], gradients: list[Any]
    ) -> Any:
        """Stock's ``partition_grads``, made to copy what is new in this step, and to add else."""
        optimizer = self._optimizer
        ids = {param.ds_id for param in params}
        unwritten = ids - self._written
        adds = len(unwritten) < len(ids)
        if adds and unwritten:
            stage3.zero(optimizer, unwritten)
        self._written |= ids
        if optimizer.offload_optimizer:
            self._delivered -= ids
            if engines.at_boundary(optimizer):
                self._delivered |= ids
        if adds == (optimizer.micro_step_id > 0):
            return wrapped(params, gradients)
        # Above zero means "add" to every release; the value itself means nothing else there.
        with meanwhile(optimizer, micro_step_id=int(adds)):
            return wrapped(params, gradients)

    def settle(self, *params: Any) -> set[int]:
        """Before anybody looks: let what earlier steps left be zero, once this one has begun.

        Returns the ids of those that have gradients.
        """
        ids = {param.ds_id for param in params if param.requires_grad}
        if self._written and (stale := ids - self._written):
            stage3.zero(self._optimizer, stale)
        optimizer = self._optimizer
        if optimizer.offload_optimizer and (late := (ids & self._written) - self._delivered):
            stage3.deliver(optimizer, late)
        return ids

    def given(self, ids: set[int]) -> None:
        """What a script has put in their place is the gradient of this step, so far."""
        if self._optimizer.offload_optimizer:
            stage3.take_back(self._optimizer, ids)
        self._written |= ids
        self._delivered |= ids

    def complete(self) -> None:
        """Zero what this step has not written; hand on what no boundary backward did."""
        optimizer = self._optimizer
        if not self._written and not _partitions(optimizer):
            return  # what another library has written is not ours to zero
        if unwritten := stage3.gradient_partitions(optimizer).keys() - self._written:
            stage3.zero(optimizer, unwritten)
        if optimizer.offload_optimizer and (late := self._written - self._delivered):
            stage3.deliver(optimizer, late)

    def drop(self) -> None:
        stage3.zero(self._optimizer, self._written)
        stage3.clear(self._optimizer)
        self.step_taken()

    def abandon(self) -> None:
        stage3.empty_buckets(self._optimizer)
        stage3.partition_parameters(self._optimizer)
        self._optimizer.averaged_gradients = {}
        self._optimizer.micro_step_id = 0
        self.drop()

    def step_taken(self) -> None:
        self._written.clear()
        self._delivered.clear()


def _partitions(optimizer: Any) -> bool:
    """Whether upstream's ``partition_grads`` comes to us: a library may have put its own there."""
    return live.leads_to(optimizer.partition_grads, around_partition_grads)
