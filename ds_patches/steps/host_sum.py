"""Stages 1 and 2 with an offloaded optimizer: micro steps add up on the host.

Stock keeps a sum per parameter there, which a backward at the boundary copies over the fp32
gradients that the step reads. It never clears either: up to 0.18.9 what the second micro step adds
is lost to the third, a parameter that a later forward reaches first finds the last step's sum, and
one that no backward at the boundary reaches is stepped with an older gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.layer import Layer
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero12
from ds_patches.upstream import zero12_offload as offload
from ds_patches.upstream.accelerator import synchronize


class HostSum:
    """Which of one optimizer's parameters have gradients of the present step on the host."""

    def __init__(self, optimizer: Any, is_new: bool) -> None:
        """is_new: no step was taken, so that what is there already was given by a script."""
        self._optimizer = optimizer
        self._aside: list[torch.Tensor] = []  # fp32 partitions
        self._pending: set[int] = set()  # parameters whose host sum no boundary has delivered
        # Those that a script has put into the fp32 partition, and all whose gradients are there.
        self._given = offload.nonzero_param_ids(optimizer) if is_new else set[int]()
        self._delivered = set(self._given)
        #: Parameters whose gradients the running backward has put into the fp32 partition.
        self._delivered_now: set[int] = set()
        #: At this one optimizer: it is called for every parameter, and only here it matters.
        self.layers = [
            Layer(optimizer, "copy_grads_in_partition", self._copy),
            Layer(optimizer, offload.LINKING_METHOD, self._link),
        ]
        offload.watch_gradients(optimizer, self._settle)

    @property
    def is_due(self) -> bool:
        """Whether the next backward has to leave alone what a script has put in the partitions."""
        return bool(self._given or self._aside)

    def _settle(self, param_id: int, is_given: bool) -> None:
        """Make a gradient what this step has so far, before a script reads or gives one.

        Once the step has begun, what an older one has left is zero.
        """
        begun = self._pending or self._delivered or is_given
        if begun and param_id not in self._delivered:
            synchronize()
            if not offload.host_sums_are_partitions(self._optimizer):
                offload.zero_fp32_gradients(self._optimizer, [param_id])
                offload.add_host_sums(self._optimizer, self._pending & {param_id})
        if is_given:
            self._pending.discard(param_id)
            self._delivered.add(param_id)
            self._given.add(param_id)

    def begin_backward(self) -> None:
        """Note that the backward that begins has delivered nothing yet."""
        self._delivered_now.clear()

    def set_aside(self) -> None:
        """Take the fp32 partitions out; the backward then runs as a step's only one would."""
        optimizer = self._optimizer
        if self._aside or not self._delivered:
            return
        synchronize()
        if zero12.any_sums_in_place(optimizer):
            taken = offload.copy_sums_to_device(optimizer, self._given)
            self._pending |= taken
            self._delivered -= taken
            self._given -= taken
            return
        self._zero_what_is_older()
        for gradient in offload.fp32_grads(optimizer):
            self._aside.append(gradient.clone())
            gradient.zero_()
        if offload.host_sums_are_partitions(optimizer):
            self._pending.clear()

    def add_back(self) -> None:
        """Add what was set aside, after the backward's epilogue."""
        if not self._aside:
            return
        synchronize()
        for gradient, before in zip(offload.fp32_grads(self._optimizer), self._aside, strict=True):
            gradient.add_(before)
        self._aside = []
        offload.renew_norms(self._optimizer)

    def finalize(self, wrapped: Callable[[], Any]) -> None:
        """DeepSpeed's step, its own boundary, copies host sums; here not over given ones."""
        self.add_back()
        due = offload.param_ids_due_at_step(self._optimizer)
        due -= self._delivered
        wrapped()
        self._pending -= due
        self._delivered |= due

    def complete(self) -> None:
        """Make the fp32 partitions whole, as a step is about to read them."""
        optimizer = self._optimizer
        self.add_back()  # a backward that was to add to it has reached no parameter
        if self._given:
            offload.renew_norms(optimizer)
        if not self._pending and self._delivered.issuperset(optimizer.grad_position):
            return
        synchronize()
        if not offload.host_sums_are_partitions(optimizer):
            self._zero_what_is_older()
            offload.add_host_sums(optimizer, self._pending)

    def drop(self) -> None:
        self._optimizer.local_overflow = False  # of what is dropped
        for gradient in offload.fp32_grads(self._optimizer):
            gradient.zero_()
        for buffer in self._optimizer.accumulated_grads_in_cpu.values():
            buffer.zero_()

    def step_taken(self) -> None:
        self._aside = []
        self._pending.clear()
        self._delivered.clear()
        self._given.clear()

    def detach(self) -> None:
        """Leave the optimizer to stock."""
        offload.watch_gradients(self._optimizer, None)

    def _link(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed makes anew what scripts read, as a checkpoint was loaded; watch that, too."""
        wrapped(*args, **kwargs)
        offload.watch_gradients(self._optimizer, self._settle)

    def _zero_what_is_older(self) -> None:
        optimizer = self._optimizer
        offload.zero_fp32_gradients(optimizer, optimizer.grad_position.keys() - self._delivered)

    def _copy(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Stock's ``copy_grads_in_partition``, made to add to what is pending alone."""
        optimizer = self._optimizer
        param = args[0] if args else in_order(wrapped, args, kwargs)[0]  # of every parameter
        param_id = optimizer.get_param_id(param)
        boundary = upstream_boundary.is_at_boundary(optimizer)
        adds = param_id in self._pending
        kept = offload.accumulation_overrides(optimizer) if adds or not boundary else {}
        comes_again = boundary and param_id in self._delivered_now
        before = offload.copy_fp32_gradient(optimizer, param_id) if comes_again else None
        with meanwhile(optimizer, micro_step_id=int(adds), **kept):
            result = wrapped(*args, **kwargs)
        if before is not None:
            offload.add_to_fp32_gradient(optimizer, param_id, before)
        if boundary:
            self._delivered_now.add(param_id)
            self._pending.discard(param_id)
            self._delivered.add(param_id)
        else:
            offload.store_host_sum(optimizer, param)
            self._pending.add(param_id)
        return result
