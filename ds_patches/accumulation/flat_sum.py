"""Stages 1 and 2: gradients of the backwards of a step add up in the averaged gradients.

A boundary backward leaves this rank's reduced gradients in ``averaged_gradients`` (per parameter
group, a list of slices), with an offloaded optimizer in the fp32 gradients of its partition.
0.16.0-0.17.5 add to them, 0.17.6-0.18.2 crash, later releases replace them. Here the previous
ones are taken out before the backward and added after its epilogue: one shape for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_patches.runtime import engines
from ds_patches.runtime.attributes import Shadow

from .bucket_order import BucketOrder
from .gradient_sum import GradientSum
from .host_sum import HostSum
from .upstream import buckets, flat


class FlatSum(GradientSum):
    """The reduced gradients of one stage 1 or 2 optimizer over the backwards of a step."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._host = HostSum(optimizer, engine.global_steps == 0) if optimizer.cpu_offload else None
        self._shadow: Shadow | None = None
        self._overlaps = optimizer.overlap_comm
        if flat.steps_unreduced(optimizer):
            self._shadow = Shadow(engine, "allreduce_gradients", self._reduce)
            optimizer.overlap_comm = False  # it would reduce before, in the backward
        self._order: BucketOrder | None = None
        if buckets.may_differ(optimizer):
            self._order = BucketOrder(buckets.ReduceBuckets(optimizer))
            self._reductions = Shadow(optimizer, "reduce_ipg_grads", self._order.reduce)
        self._groups = range(len(optimizer.bit16_groups))
        self._leaves = flat.leaves_what_came_before(optimizer)
        self._reduced = False  # a boundary epilogue ran in this step
        self._empty = False  # what it left was dropped
        #: Whether upstream keeps micro steps that no backward at the boundary has taken.
        self.is_pending = False

    def begin_backward(self) -> None:
        """What the backwards before have reduced is set aside."""
        if self._reduced:
            flat.refuse_muon(self._optimizer)
        if self._host is not None and (self._reduced or self._host.is_due):
            self._host.set_aside()
        if self._order is not None:
            self._order.begin_backward()

    def pass_by(self) -> None:
        """The backward that began has brought nothing."""
        if self._host is not None:
            self._host.add_back()

    def epilogue(self, wrapped: Callable[[], Any]) -> Any:
        """Stock's reduction epilogue, made to add."""
        optimizer = self._optimizer
        if self._leaves:
            flat.reduce_what_is_left(optimizer)
        if self._order is not None:
            self._order.end_backward()
        boundary = engines.at_boundary(optimizer)
        self.is_pending = not boundary
        adds = self._reduced or (self._host is not None and self._host.is_due)
        self._reduced |= boundary
        if not adds:
            return wrapped()
        return self._adding(wrapped, {g for g in self._groups if flat.sums_in_place(optimizer, g)})

    def deliver(self, put: Callable[[], None]) -> None:
        """Add what another reduction than stock's brought, which `put` leaves as stock does."""
        if self._reduced:
            self._adding(put, set())
        else:
            self._reduced = True
            put()

    def _adding(self, wrapped: Callable[[], Any], in_place: set[int]) -> Any:
        optimizer = self._optimizer
        averaged = dict(optimizer.averaged_gradients)
        pending = dict(flat.pending_gradients(optimizer))
        for group in averaged.keys() - in_place:
            # Also what 0.17.6-0.18.2 need in order not to crash.
            optimizer.averaged_gradients[group] = None
        result = wrapped()
        _add_back(optimizer.averaged_gradients, averaged, restore=True)
        _add_back(flat.pending_gradients(optimizer), pending, restore=False)
        if self._host is not None:
            self._host.add_back()
        return result

    def complete(self) -> None:
        """An offloaded optimizer reads more than the last epilogue left; or all was dropped."""
        if self._host is not None:
            self._host.complete()
        elif self._empty and not self._reduced:
            flat.give_zeros(self._optimizer)

    def drop(self) -> None:
        optimizer = self._optimizer
        for gradients in (optimizer.averaged_gradients, flat.pending_gradients(optimizer)):
            for group in gradients:
                gradients[group] = None
        flat.clear(optimizer)
        optimizer.micro_step_id = flat.INITIAL_MICRO_STEP_ID
        if self._host is not None:
            self._host.drop()
        self.step_taken()
        self._empty = True

    def abandon(self) -> None:
        if self._order is not None:
            self._order.begin_backward()
        flat.empty_buckets(self._optimizer)
        self.drop()

    def step_taken(self) -> None:
        self._reduced = self._empty = self.is_pending = False
        if self._host is not None:
            self._host.step_taken()

    def detach(self) -> None:
        if self._host is not None:
            self._host.detach()
        if self._shadow is not None:
            self._shadow.remove()
            self._optimizer.overlap_comm = self._overlaps
        if self._order is not None:
            self._order.detach()
            self._reductions.remove()

    def _reduce(self, wrapped: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with flat.reducing_what_it_steps_with(self._optimizer):
            wrapped(*args, **kwargs)


def _add_back(now: flat.Gradients, before: flat.Gradients, *, restore: bool) -> None:
    """Add the slices of `before` to those that replaced them.

    `restore`: a group that the epilogue left empty was not touched and gets its slices back;
    otherwise it was consumed.
    """
    for group, old in before.items():
        new = now.get(group)
        if old is None or new is old:
            continue
        if new is not None:
            for slice_now, slice_before in zip(new, old, strict=True):
                slice_now.add_(slice_before)
        elif restore:
            now[group] = old
