"""Stages 1 and 2: gradients of several backwards add up in the averaged gradients.

A boundary backward leaves this rank's reduced gradients in ``averaged_gradients`` (per parameter
group, a list of slices), with an offloaded optimizer in the fp32 gradients of its partition.
0.16.0-0.17.5 add to them, 0.17.6-0.18.2 crash, later releases replace them. Here the previous
ones are taken out before the backward and added after its epilogue: one shape for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core import engines

from .lost import LostGradients
from .upstream import flat, offload


class FlatSum:
    """The reduced gradients of one stage 1 or 2 optimizer over the backwards of a step."""

    def __init__(self, optimizer: Any, lost: LostGradients) -> None:
        self._optimizer = optimizer
        self._lost = lost
        self._reduced = False  # a boundary epilogue ran in this step
        self._adding = False
        self._offloaded: list[torch.Tensor] = []  # fp32 partitions, set aside
        # Parameters whose gradients reached, in this step, the host and the fp32 partition there.
        self._copied: set[int] = set()
        self._delivered: set[int] = set()

    def begin_backward(self) -> None:
        """The first backward over a forward."""
        self._adding = self._reduced and self._lost.accumulates
        self._take_out_offloaded()

    def begin_backward_again(self) -> None:
        """A later backward over the same forward."""
        self._adding = True
        self._take_out_offloaded()

    def drop(self) -> None:
        """``zero_grad()`` between two backwards: forget the step's gradients so far."""
        optimizer = self._optimizer
        for gradients in (optimizer.averaged_gradients, flat.pending_gradients(optimizer)):
            for group in gradients:
                gradients[group] = None
        for gradient in offload.partitions(optimizer):
            gradient.zero_()
        for buffer in offload.host_sums(optimizer).values():
            buffer.zero_()
        for params in optimizer.bit16_groups:
            for param in params:
                param.grad = None
                param.grad_accum = None
        optimizer.micro_step_id = flat.INITIAL_MICRO_STEP_ID

    def abandon(self) -> None:
        """A backward raised: drop what waits in the buckets, and the step's gradients with it."""
        flat.empty_buckets(self._optimizer)
        self.drop()
        self.step_taken()

    def step_taken(self) -> None:
        """The optimizer has consumed the gradients."""
        self._reduced = False
        self._adding = False
        self._offloaded = []
        self._copied.clear()
        self._delivered.clear()

    def epilogue(self, wrapped: Callable[[], Any]) -> Any:
        """Stock's reduction epilogue, made to add where it has to."""
        optimizer = self._optimizer
        averaged = dict(optimizer.averaged_gradients)
        pending = dict(flat.pending_gradients(optimizer))
        if self._adding:
            # Also what 0.17.6-0.18.2 need in order not to crash.
            for group in averaged:
                if not offload.sums_in_place(optimizer, group):
                    optimizer.averaged_gradients[group] = None
        result = wrapped()
        if self._adding:
            _add_back(optimizer.averaged_gradients, averaged, restore=True)
            _add_back(flat.pending_gradients(optimizer), pending, restore=False)
            self._add_back_offloaded()
        elif self._reduced and flat.replaced(optimizer, averaged):
            self._lost.warn()
        self._reduced |= engines.at_boundary(optimizer)
        return result

    def copy_to_partition(self, wrapped: Callable[..., Any], param: Any, *rest: Any) -> Any:
        """Stock's ``copy_grads_in_partition``, made to add where it has to under CPU offload."""
        optimizer = self._optimizer
        if not optimizer.cpu_offload:
            return wrapped(param, *rest)
        param_id = optimizer.get_param_id(param)
        boundary = engines.at_boundary(optimizer)
        if self._adding and param_id not in self._copied:
            # Stock never clears its host sums: an old step may have left one.
            offload.zero_host_sum(optimizer, param_id)
        if self._offloaded:
            # The fp32 gradient set aside holds the host sum already if a boundary delivered it.
            optimizer.micro_step_id = 0 if param_id in self._delivered else 1
        result = wrapped(param, *rest)
        if self._adding and not boundary:
            offload.store_host_sum(optimizer, param)
        self._copied.add(param_id)
        if boundary:
            self._delivered.add(param_id)
        return result

    def _take_out_offloaded(self) -> None:
        """Set the fp32 partitions aside; the backward then runs as a step's only one would."""
        self._offloaded = []
        optimizer = self._optimizer
        # Until a boundary epilogue ran, nothing of this step has reached the fp32 partitions.
        if not (self._adding and self._reduced and offload.overwrites(optimizer)):
            return
        offload.finish_copies()
        offload.zero_partitions(optimizer, all_but=self._delivered)
        for gradient in offload.partitions(optimizer):
            self._offloaded.append(gradient.clone())
            gradient.zero_()

    def _add_back_offloaded(self) -> None:
        if not self._offloaded:
            return
        offload.finish_copies()
        partitions = offload.partitions(self._optimizer)
        for gradient, before in zip(partitions, self._offloaded, strict=True):
            gradient.add_(before)
        self._offloaded = []
        offload.renew_norms(self._optimizer)


def _add_back(now: flat.Gradients, before: flat.Gradients, *, restore: bool) -> None:
    """Add the slices of `before` to those that replaced them.

    `restore`: a group that the epilogue left empty was not touched and gets its slices back;
    otherwise it was consumed.
    """
    for group, old in before.items():
        new = now.get(group)
        if old is None or new is old:
            continue
        if new is None:
            if restore:
                now[group] = old
            continue
        for slice_now, slice_before in zip(new, old, strict=True):
            slice_now.add_(slice_before)
