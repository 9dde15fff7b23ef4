"""Stage 3: gradients of the backwards of a step add up in the partition buffer.

Each rank holds one flat slice per parameter. Stock copies into it or adds to it by a counter that
moves with the *forward* from 0.18.5 on, and never clears it: what an earlier step left there for
a parameter without a gradient stays, and is stepped with. Here a slice is copied into when its
step writes it first, added to from then on, and zeroed if its step has not written it at all.
"""

from __future__ import annotations

from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.steps.attached import KEY
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero3, zero3_gathers


def around_partition_grads(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The stage 3 optimizer partitions the gradients of a bucket."""
    steps = vars(optimizer).get(KEY)
    if steps is None or not isinstance(steps.sum, Zero3Sum):
        return wrapped(*args, **kwargs)
    return steps.sum.partition(wrapped, *in_order(wrapped, args, kwargs))


class Zero3Sum(GradientSum):
    """Which gradient partitions of one stage 3 optimizer hold gradients of the present step."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._optimizer = engine.optimizer
        self._written: set[int] = set()  # ds_id
        self._delivered: set[int] = set()  # of them, those that reached an offloaded optimizer

    def partition(self, wrapped: Wrapped, params: list[Any], gradients: list[Any]) -> Any:
        """Stock's ``partition_grads``, made to copy what is new in this step, and to add else."""
        optimizer = self._optimizer
        ids = {param.ds_id for param in params}
        unwritten = ids - self._written
        adds = len(unwritten) < len(ids)
        if adds and unwritten:
            zero3.zero(optimizer, unwritten)
        self._written |= ids
        if optimizer.offload_optimizer:
            self._delivered -= ids
            if upstream_boundary.is_at_boundary(optimizer):
                self._delivered |= ids
        if adds == (optimizer.micro_step_id > 0):
            return wrapped(params, gradients)
        # Above zero means "add" to every release; the value itself means nothing else there.
        with meanwhile(optimizer, micro_step_id=int(adds)):
            return wrapped(params, gradients)

    def settle(self, *params: Any) -> set[int]:
        """Zero what earlier steps have left of these parameters, before a script looks.

        Returns the ids of those that train.
        """
        ids = {param.ds_id for param in params if param.requires_grad}
        if self._written and (stale := ids - self._written):
            zero3.zero(self._optimizer, stale)
        optimizer = self._optimizer
        if optimizer.offload_optimizer and (late := (ids & self._written) - self._delivered):
            zero3.deliver(optimizer, late)
        return ids

    def given(self, ids: set[int]) -> None:
        """Take what a script has put there for the gradients of this step so far."""
        if self._optimizer.offload_optimizer:
            zero3.take_back(self._optimizer, ids)
        self._written |= ids
        self._delivered |= ids

    def lacks(self, unreduced: bool) -> bool:
        optimizer = self._optimizer
        return not optimizer.offload_optimizer and upstream_boundary.lacks_averages(optimizer)

    def complete(self) -> None:
        """Zero what this step has not written; hand on what no boundary backward did."""
        optimizer = self._optimizer
        if not self._written and not live.leads_to(
            optimizer.partition_grads, around_partition_grads
        ):
            return  # a library has put its own there: what that has written is not ours to zero
        if unwritten := zero3.gradient_partitions(optimizer).keys() - self._written:
            zero3.zero(optimizer, unwritten)
        if optimizer.offload_optimizer and (late := self._written - self._delivered):
            zero3.deliver(optimizer, late)

    def drop(self) -> None:
        zero3.zero(self._optimizer, self._written)
        zero3.clear(self._optimizer)
        self.step_taken()

    def spare(self) -> None:
        zero3.partition_parameters(self._optimizer)

    def abandon(self) -> None:
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        self._optimizer.averaged_gradients = {}
        self._optimizer.micro_step_id = 0
        self.drop()

    def step_taken(self) -> None:
        self._written.clear()
        self._delivered.clear()

    def detach(self) -> None:
        """Leave the optimizer to stock, which in the middle of a step is to add to its sum."""
        super().detach()
        if self._written:
            self.complete()
            self._optimizer.micro_step_id = max(1, self._optimizer.micro_step_id)

    # --- Local gradients --------------------------------------------------------------------------

    def trained(self) -> list[Any]:
        return [p for group in self._optimizer.fp16_groups for p in group if p.requires_grad]

    def is_late(self) -> bool:
        return bool(zero3.in_buckets(self._optimizer))

    def reduce_local(self, lacking: set[Any]) -> None:
        for param in self.trained():
            if lacking and param in lacking:
                zero3.give_zero_gradient(param)
            if param.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(param)
        self._optimizer.independent_gradient_partition_epilogue()

    def drop_local(self) -> None:
        zero3.clear(self._optimizer)
        # Nothing waits there, but 0.17.2 never begins anew to count what a bucket holds. Full is
        # when to reduce: ranks must count alike, also after one of them alone has raised.
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        zero3_gathers.reset(self._optimizer.parameter_offload)
