"""Stages 1 and 2: the sum of a step's gradients in the averaged gradients.

A backward at the boundary leaves this rank's reduced gradients in ``averaged_gradients`` (per
parameter group, a list of slices); `host_sum` is for an offloaded optimizer. A second backward adds
to them in 0.16.0-0.17.5, crashes in 0.17.6-0.18.2, and replaces them later. Here the earlier
gradients are removed before the epilogue and added after it, in every release.
"""

from collections.abc import Callable
from typing import Any

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.arrivals import ReducedGradients
from ds_patches.steps.bucket_order import BucketOrder
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.classes import is_muon
from ds_patches.upstream.engine import has_torch_style_backward
from ds_patches.upstream.zero12_buckets import ReduceBuckets

# Muon orthogonalises the gradients of each epilogue, and the sum of two results is not orthogonal.
_SECOND_WITH_MUON = (
    "a second backward at the gradient accumulation boundary of one step, with Muon: each would be "
    "orthogonalised by itself, and not their sum. Add the losses, or call "
    "engine.set_gradient_accumulation_boundary(False) before all but the last backward, or put the "
    "backwards into `with engine.coalesce_grad_reduction():`."
)


class Zero12Sum(GradientSum):
    """The sum of the reduced gradients of one stage 1 or 2 optimizer over a step's backwards."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = optimizer = engine.optimizer
        super().__init__(holds_local=not optimizer.partition_gradients)
        self.attribute = zero12.gradient_attribute(optimizer)
        epilogue = "independent_gradient_partition_epilogue"
        self.layers.append(Layer(optimizer, epilogue, self._epilogue))
        self._overlap_comm = optimizer.overlap_comm
        if zero12.steps_with_local_sums(optimizer):
            self.layers.append(Layer(engine, "allreduce_gradients", self._allreduce))
            optimizer.overlap_comm = False  # it would reduce in the backward
        self._buckets = ReduceBuckets(optimizer)
        self._order = BucketOrder(self._buckets) if self._buckets.are_shared else None
        self._reduced_gradients = ReducedGradients(self._buckets, self._order, self)
        self.layers.append(Layer(optimizer, "reduce_ipg_grads", self._reduced_gradients.reduce))
        self._is_muon = is_muon(optimizer)
        self._is_torch_style = has_torch_style_backward(engine)
        # Stage 1 without fp32 sums keeps earlier micro steps in ``grad``, which zero_grad() drops.
        sums = optimizer.use_grad_accum_attribute
        self.keeps_earlier_micro_steps = bool(optimizer.partition_gradients or sums)
        # With overlap_comm, stage 1 reduces only the parameters of the step's last backward.
        self._reduces_last_only = bool(optimizer.overlap_comm) and self.holds_local
        self._engine_manages_boundary = upstream_boundary.manages_boundary(engine)
        if not self._engine_manages_boundary:
            finalize = "finalize_gradient_accumulation_boundary"
            self.layers.append(Layer(optimizer, finalize, self._finalize))
        self._reduced_at_boundary = False  # an epilogue of this step ran at the boundary

    def begin_backward(self) -> None:
        """Reset the state of the last backward. With Muon, refuse a second backward."""
        if self._reduced_at_boundary and self._is_muon:
            raise Refused(_SECOND_WITH_MUON)
        self._reduced_gradients.begin_backward()

    def end_empty_backward(self, failed: bool = False) -> bool:
        if self._is_torch_style:
            self._optimizer.exit_backward()
        return True

    def _epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Run DeepSpeed's reduction epilogue so that it adds to the step's gradients."""
        boundary = upstream_boundary.is_at_boundary(self._optimizer)
        if self._reduces_last_only and boundary:
            self._buckets.reduce_earlier_backwards(self._order.held if self._order else ())
        self._reduced_gradients.begin_epilogue()
        self.in_upstream_zero_grad = True
        try:
            if self._reduced_at_boundary:
                self._run_and_add(wrapped)
            else:
                wrapped()
        finally:
            self.in_upstream_zero_grad = False
            self._reduced_at_boundary |= boundary

    def _run_and_add(self, wrapped: Callable[[], Any]) -> None:
        """Run the epilogue without the step's gradients, and add them to those that it leaves."""
        optimizer = self._optimizer
        averaged = dict(optimizer.averaged_gradients)
        pending = dict(zero12.pending_gradients(optimizer))
        for group in averaged:
            if not zero12.sums_in_place(optimizer, group):
                # So that the epilogue replaces them in every release: 0.17.6-0.18.2 would crash.
                optimizer.averaged_gradients[group] = None
        wrapped()
        _add_slices(optimizer.averaged_gradients, averaged, restore=True)
        _add_slices(zero12.pending_gradients(optimizer), pending, restore=False)

    def _finalize(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Take the gradients in a step that is its own boundary; zeros, if all were dropped."""
        if not self.takes_zeros or any(zero12.pending_gradients(self._optimizer).values()):
            wrapped(*args, **kwargs)
            self._reduced_at_boundary = True

    def lacks_gradients(self, has_unreduced: bool) -> bool:
        if self._reduced_at_boundary or not self._engine_manages_boundary:
            return False
        if self.takes_zeros:
            return has_unreduced
        return upstream_boundary.lacks_averages(self._optimizer)

    def complete(self) -> None:
        """Give the optimizer zeros if the step has no gradients."""
        if self.takes_zeros and not self._reduced_at_boundary:
            zero12.set_zero_averages(self._optimizer)

    def drop(self) -> None:
        optimizer = self._optimizer
        for gradients in (optimizer.averaged_gradients, zero12.pending_gradients(optimizer)):
            for group in gradients:
                gradients[group] = None
        if not self._is_torch_style:  # no epilogue has followed another engine's backward
            zero12.empty_buckets(optimizer)
        zero12.clear_gradients(optimizer)
        optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID
        self.step_taken()
        self.takes_zeros = True

    def drop_failed_backward(self) -> None:
        self._reduced_gradients.begin_backward()
        zero12.empty_buckets(self._optimizer)
        self.drop()

    def step_taken(self) -> None:
        self._reduced_at_boundary = self.takes_zeros = False

    def detach(self) -> None:
        super().detach()
        self._optimizer.overlap_comm = self._overlap_comm
        self._buckets.stop_diverting()

    def _allreduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        with zero12.averaging_local_sums(self._optimizer):
            wrapped(*args, **kwargs)

    # --- Local gradients: in `grad`, or in `grad_accum` as fp32 sums of a low precision model ---

    def parameters(self) -> list[Any]:
        return [param for group in self._optimizer.bit16_groups for param in group]

    def has_nonlocal_gradients(self) -> bool:
        return self._reduced_gradients.has_reduced or bool(self._buckets.contents())

    def missing_params(self, group: Any) -> set[Any] | None:
        # Each epilogue does this too, but not every backward has one: from 0.18.3 on the second
        # ``loss.backward()`` over one forward has none.
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer.fill_grad_accum_attribute()
        return super().missing_params(group)

    def reduce_local(self, missing: set[Any]) -> None:
        """Reduce as a single backward would, at the boundary and with micro_step_id 0.

        Every release then copies the whole sum to the host, if the optimizer is offloaded.
        """
        optimizer = self._optimizer
        if optimizer.overlap_comm and not is_single_stream():
            optimizer.reduction_stream.synchronize()  # reads the buckets of an earlier step
        zero12.release_buffers(optimizer)
        with zero12.averaging_local_sums(optimizer):
            zero12.set_up_buckets(optimizer)
            optimizer.micro_step_id = 0
            for group, params in enumerate(optimizer.bit16_groups):
                for param in params:
                    if missing and param in missing:
                        zero12.set_zero_gradient(optimizer, param)
                    if optimizer.get_gradient_for_reduction(param) is not None:
                        optimizer.reduce_ready_partitions_and_remove_grads(param, group)
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        zero12.clear_gradients(optimizer)

    def drop_local(self) -> None:
        zero12.clear_gradients(self._optimizer)
        zero12.release_buffers(self._optimizer)
        self._optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID


def _add_slices(current: zero12.Gradients, previous: zero12.Gradients, *, restore: bool) -> None:
    """Add the slices of `previous` to those that replaced them, in place.

    current, previous: by parameter group, lists of slices.
    restore: put the slices of a group back if `current` has none; else DeepSpeed has used them.
    """
    for group, old in previous.items():
        new = current.get(group)
        if old is None or new is old:
            continue
        if new is not None:
            for current_slice, previous_slice in zip(new, old, strict=True):
                current_slice.add_(previous_slice)
        elif restore:
            current[group] = old
