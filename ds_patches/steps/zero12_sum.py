"""Stages 1 and 2: gradients of the backwards of a step add up in the averaged gradients.

A boundary backward leaves this rank's reduced gradients in ``averaged_gradients`` (per parameter
group, a list of slices), with an offloaded optimizer in the fp32 gradients of its partition.
0.16.0-0.17.5 add to them, 0.17.6-0.18.2 crash, later releases replace them. Here the previous
ones are taken out before the backward and added after its epilogue: one shape for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.arrivals import ReducedGradients
from ds_patches.steps.bucket_order import BucketOrder
from ds_patches.steps.host_sum import HostSum
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.classes import is_muon
from ds_patches.upstream.zero12_buckets import ReduceBuckets, shares_buckets

# Muon orthogonalises what an epilogue has reduced: two of those do not add up to one.
_SECOND_WITH_MUON = (
    "a second backward at the gradient accumulation boundary of one step, with Muon: each would be "
    "orthogonalised by itself, and not their sum. Add the losses, or call "
    "engine.set_gradient_accumulation_boundary(False) before all but the last backward, or put the "
    "backwards into `with engine.coalesce_grad_reduction():`."
)


class Zero12Sum(GradientSum):
    """The reduced gradients of one stage 1 or 2 optimizer over the backwards of a step."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._optimizer = optimizer = engine.optimizer
        self.holds_local = not optimizer.partition_gradients
        epilogue = "independent_gradient_partition_epilogue"
        self.layers.append(Layer(optimizer, epilogue, self._epilogue))
        self._host = HostSum(optimizer, engine.global_steps == 0) if optimizer.cpu_offload else None
        if self._host is not None:
            self.layers += self._host.layers
        self._overlaps = False  # before we came
        if zero12.steps_with_local_sums(optimizer):
            self._overlaps = optimizer.overlap_comm
            self.layers.append(Layer(engine, "allreduce_gradients", self._reduce))
            optimizer.overlap_comm = False  # it would reduce before, in the backward
        self._buckets = ReduceBuckets(optimizer)
        self._order = BucketOrder(self._buckets) if shares_buckets(optimizer) else None
        self._reduced_gradients = ReducedGradients(self._buckets, self._order, self)
        self.layers.append(Layer(optimizer, "reduce_ipg_grads", self._reduced_gradients.reduce))
        self._is_muon = is_muon(optimizer)
        # Stage 1 without fp32 sums keeps them in the parameters' ``grad``, which zero_grad() drops.
        sums = optimizer.use_grad_accum_attribute
        self.keeps_earlier_micro_steps = bool(optimizer.partition_gradients or sums)
        # DeepSpeed then drops the sums of parameters that the step's last backward does not reach.
        self._reduces_last_only = bool(optimizer.overlap_comm) and self.holds_local
        self._is_managed = upstream_boundary.manages_boundary(engine)
        if not self._is_managed:
            finalize = "finalize_gradient_accumulation_boundary"
            self.layers.append(Layer(optimizer, finalize, self._finalize))
        self._reduced = False  # whether an epilogue ran at the boundary, in this step
        self._empty = False  # whether what it left was dropped

    def begin_backward(self) -> None:
        """Set aside what earlier backwards of the step have left on the host."""
        if self._reduced and self._is_muon:
            raise Refused(_SECOND_WITH_MUON)
        if self._host is not None:
            self._host.begin_backward()
            if self._reduced or self._host.is_due:
                self._host.set_aside()
        self._reduced_gradients.forget()
        if self._order is not None:
            self._order.begin_backward()

    def has_come(self) -> bool:
        return self.is_late() or (self.holds_local and super().has_come())

    def marks(self) -> list[tuple[int, int]]:
        return [(id(gradient), gradient._version) for gradient in self.local()]

    def pass_by(self) -> bool:
        if self._host is not None:
            self._host.add_back()
        if hasattr(self._optimizer, "exit_backward"):  # 0.18.3
            self._optimizer.exit_backward()
        return True

    def _epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Stock's reduction epilogue, made to add."""
        boundary = upstream_boundary.is_at_boundary(self._optimizer)
        if self._reduces_last_only and boundary:
            self._buckets.reduce_earlier_backwards(self._order.held if self._order else ())
        if self._order is not None:
            self._order.end_backward()
        self._reduced_gradients.is_last = True
        adds = self._reduced or (self._host is not None and self._host.is_due)
        self._reduced |= boundary
        self.upstream_zeroes = True
        try:
            if adds:
                self._add(wrapped)
            else:
                wrapped()
        finally:
            self.upstream_zeroes = self._reduced_gradients.is_last = False

    def _add(self, wrapped: Callable[[], Any]) -> None:
        optimizer = self._optimizer
        averaged = dict(optimizer.averaged_gradients)
        pending = dict(zero12.pending_gradients(optimizer))
        for group in averaged:
            if not zero12.sums_in_place(optimizer, group):
                # Also what 0.17.6-0.18.2 need in order not to crash.
                optimizer.averaged_gradients[group] = None
        wrapped()
        _add_back(optimizer.averaged_gradients, averaged, restore=True)
        _add_back(zero12.pending_gradients(optimizer), pending, restore=False)
        if self._host is not None:
            self._host.add_back()

    def _finalize(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed's step, its own boundary, takes gradients; here zeros, if all were dropped."""
        if self._host is not None:
            self._host.finalize(wrapped)
        elif not self._empty or any(zero12.pending_gradients(self._optimizer).values()):
            wrapped(*args, **kwargs)
            self._reduced = True

    def lacks(self, unreduced: bool) -> bool:
        if self._reduced or not self._is_managed:
            return False
        if self._host is not None:  # the sum of stage 2 is there already
            return unreduced and not self.keeps_earlier_micro_steps
        return unreduced if self._empty else upstream_boundary.lacks_averages(self._optimizer)

    def complete(self) -> None:
        """Hand on what the last epilogue has not: sums on the host, or zeros if all was dropped."""
        if self._host is not None:
            self._host.complete()
        elif self._empty and not self._reduced:
            zero12.set_zero_averages(self._optimizer)

    def drop(self) -> None:
        optimizer = self._optimizer
        for gradients in (optimizer.averaged_gradients, zero12.pending_gradients(optimizer)):
            for group in gradients:
                gradients[group] = None
        zero12.clear_gradients(optimizer)
        optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID
        if self._host is not None:
            self._host.drop()
        self.step_taken()
        self._empty = True

    def abandon(self) -> None:
        self._reduced_gradients.forget()
        if self._order is not None:
            self._order.begin_backward()
        zero12.empty_buckets(self._optimizer)
        self.drop()

    def step_taken(self) -> None:
        self._reduced = self._empty = False
        if self._host is not None:
            self._host.step_taken()

    def detach(self) -> None:
        super().detach()
        if self._overlaps:
            self._optimizer.overlap_comm = True
        if self._host is not None:
            self._host.detach()
        if self._order is not None:
            self._order.detach()

    def _reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        with zero12.averaging_local_sums(self._optimizer):
            wrapped(*args, **kwargs)

    # --- Local gradients: in `grad`, or, as fp32 sums of a low precision model, in `grad_accum` ---

    def parameters(self) -> list[Any]:
        return [param for group in self._optimizer.bit16_groups for param in group]

    def have_local(self) -> list[bool]:
        where = zero12.gradient_attribute(self._optimizer)
        return [getattr(param, where) is not None for param in self.trained()]

    def end_local(self) -> None:
        self.holds_local = not self._optimizer.partition_gradients

    def local(self) -> list[torch.Tensor]:
        where = zero12.gradient_attribute(self._optimizer)
        local = [getattr(param, where) for param in self.trained()]
        return [gradient for gradient in local if gradient is not None]

    def is_late(self) -> bool:
        return self._reduced_gradients.any or bool(self._buckets.contents())

    def lacking(self, group: Any) -> set[Any] | None:
        # The epilogue of each backward does it too, but not every backward has one: from 0.18.3
        # the second ``loss.backward()`` over one forward has none.
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer.fill_grad_accum_attribute()
        return super().lacking(group)

    def reduce_local(self, lacking: set[Any]) -> None:
        """Reduce as one backward would, at the boundary and with micro_step_id 0.

        Every release then copies the whole sum to the host, where the optimizer is offloaded.
        """
        optimizer = self._optimizer
        if optimizer.overlap_comm and not is_single_stream():
            optimizer.reduction_stream.synchronize()  # what an earlier step left in the buckets
        zero12.release_buffers(optimizer)
        with zero12.averaging_local_sums(optimizer):
            zero12.set_up_buckets(optimizer)
            optimizer.micro_step_id = 0
            for group, params in enumerate(optimizer.bit16_groups):
                for param in params:
                    if lacking and param in lacking:
                        zero12.set_zero_gradient(optimizer, param)
                    if optimizer.get_gradient_for_reduction(param) is not None:
                        optimizer.reduce_ready_partitions_and_remove_grads(param, group)
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        zero12.clear_gradients(optimizer)

    def drop_local(self) -> None:
        zero12.clear_gradients(self._optimizer)
        zero12.release_buffers(self._optimizer)
        self._optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID


def _add_back(now: zero12.Gradients, before: zero12.Gradients, *, restore: bool) -> None:
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
