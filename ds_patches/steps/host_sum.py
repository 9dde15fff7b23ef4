"""Stages 1 and 2 with an offloaded optimizer: the sum of the micro steps on the host.

The optimizer steps with fp32 gradients in this rank's partitions. DeepSpeed adds the gradients of
micro steps to a buffer per parameter on the host (the host sum), and copies the sum into the
partition in a backward at the boundary. It clears neither of them: up to 0.18.9 the second of three
micro steps is lost, a parameter that a later micro step reaches first starts from the sum of an
older step, and one that no backward at the boundary reaches is stepped with an older gradient.
"""

from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.layer import Layer
from ds_patches.steps.zero12_sum import Zero12Sum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero12
from ds_patches.upstream import zero12_offload as offload
from ds_patches.upstream.accelerator import synchronize


class HostSum(Zero12Sum):
    """An offloaded optimizer's host sums and partitions, and which of them are current."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        optimizer = self._optimizer
        self._saved_partitions: list[torch.Tensor] = []  # fp32 partitions
        self._undelivered: set[int] = set()  # ids: only the host sum is current
        # Ids of parameters whose gradients a script set, and of all with gradients in partitions.
        is_new = engine.global_steps == 0
        self._set_by_script = offload.nonzero_param_ids(optimizer) if is_new else set[int]()
        self._delivered = set(self._set_by_script)
        #: Ids of parameters whose gradients the running backward has written into the partitions.
        self._delivered_this_backward: set[int] = set()
        #: Of this optimizer only: every parameter of every optimizer would pass a class's wrapper.
        self.layers += [
            Layer(optimizer, "copy_grads_in_partition", self._copy),
            Layer(optimizer, offload.LINKING_METHOD, self._link),
        ]
        offload.watch_gradients(optimizer, self._bring_up_to_date)

    def _bring_up_to_date(self, param_id: int, is_write: bool) -> None:
        """Write this step's gradient into the partition before a script reads or sets it.

        Gradients of older steps are zeroed once the step has gradients.
        """
        has_begun = self._undelivered or self._delivered or is_write
        if has_begun and param_id not in self._delivered:
            synchronize()
            if not offload.host_sums_are_partitions(self._optimizer):
                offload.zero_fp32_gradients(self._optimizer, [param_id])
                offload.add_host_sums(self._optimizer, self._undelivered & {param_id})
        if is_write:
            self._undelivered.discard(param_id)
            self._delivered.add(param_id)
            self._set_by_script.add(param_id)

    def begin_backward(self) -> None:
        """Save and zero the fp32 partitions, or copy them to the sums on the device, if any.

        Only if the backward would overwrite gradients: those of an earlier backward at the boundary
        of this step, if there was one, or gradients that a script has set.
        """
        super().begin_backward()
        optimizer = self._optimizer
        self._delivered_this_backward.clear()
        overwrites = self._delivered and (self._reduced_at_boundary or self._set_by_script)
        if self._saved_partitions or not overwrites:
            return
        synchronize()
        if zero12.any_sums_in_place(optimizer):
            moved = offload.copy_sums_to_device(optimizer, self._set_by_script)
            self._undelivered |= moved
            self._delivered -= moved
            self._set_by_script -= moved
            return
        self._zero_stale_partitions()
        for gradient in offload.fp32_grads(optimizer):
            self._saved_partitions.append(gradient.clone())
            gradient.zero_()
        if offload.host_sums_are_partitions(optimizer):
            self._undelivered.clear()

    def end_empty_backward(self, failed: bool = False) -> bool:
        self._add_saved_partitions()
        return super().end_empty_backward()

    def _epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        super()._epilogue(wrapped, _, args, kwargs)
        self._add_saved_partitions()

    def _add_saved_partitions(self) -> None:
        """Add the saved partitions to the current ones, after the backward's epilogue."""
        if not self._saved_partitions:
            return
        synchronize()
        partitions = offload.fp32_grads(self._optimizer)
        for gradient, saved in zip(partitions, self._saved_partitions, strict=True):
            gradient.add_(saved)
        self._saved_partitions = []
        offload.renew_norms(self._optimizer)

    def _finalize(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Copy host sums in a step that is its own boundary, but not over delivered gradients."""
        self._add_saved_partitions()
        undelivered_ids = offload.param_ids_due_at_step(
            self._optimizer
        )  # the set itself, which is changed
        undelivered_ids -= self._delivered
        wrapped()
        self._undelivered -= undelivered_ids
        self._delivered |= undelivered_ids

    def lacks_gradients(self, has_unreduced: bool) -> bool:
        if self._reduced_at_boundary or not self._engine_manages_boundary:
            return False
        return has_unreduced and not self.keeps_earlier_micro_steps  # else it has the sum

    def complete(self) -> None:
        """Write the step's gradients into the fp32 partitions, before the optimizer reads them."""
        optimizer = self._optimizer
        self._add_saved_partitions()  # if the backward reached no parameter, and had no epilogue
        if self._set_by_script:
            offload.renew_norms(optimizer)
        if not self._undelivered and self._delivered.issuperset(optimizer.grad_position):
            return
        synchronize()
        if not offload.host_sums_are_partitions(optimizer):
            self._zero_stale_partitions()
            offload.add_host_sums(optimizer, self._undelivered)

    def drop(self) -> None:
        super().drop()
        self._optimizer.local_overflow = False  # the dropped gradients may have overflowed
        for gradient in offload.fp32_grads(self._optimizer):
            gradient.zero_()
        for buffer in self._optimizer.accumulated_grads_in_cpu.values():
            buffer.zero_()

    def step_taken(self) -> None:
        super().step_taken()
        self._saved_partitions = []
        self._undelivered.clear()
        self._delivered.clear()
        self._set_by_script.clear()

    def detach(self) -> None:
        """Remove the layers, and stop watching what scripts read and set."""
        super().detach()
        offload.watch_gradients(self._optimizer, None)

    def _link(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Watch the lists that scripts read again, after a checkpoint has replaced them."""
        wrapped(*args, **kwargs)
        offload.watch_gradients(self._optimizer, self._bring_up_to_date)

    def _zero_stale_partitions(self) -> None:
        optimizer = self._optimizer
        offload.zero_fp32_gradients(optimizer, optimizer.grad_position.keys() - self._delivered)

    def _copy(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Copy a reduced gradient to the host, and add it only to sums of this step."""
        optimizer = self._optimizer
        param = args[0] if args else in_order(wrapped, args, kwargs)[0]  # in_order is slow
        param_id = optimizer.get_param_id(param)
        boundary = upstream_boundary.is_at_boundary(optimizer)
        adds = param_id in self._undelivered
        micro_steps = optimizer.gradient_accumulation_steps
        # Up to 0.18.9 a micro step before a boundary set by hand is kept only if it is counted.
        if (adds or not boundary) and not offload.keeps_host_sums():
            micro_steps = max(micro_steps, 2)
        arrives_again = boundary and param_id in self._delivered_this_backward
        saved = offload.copy_fp32_gradient(optimizer, param_id) if arrives_again else None
        with meanwhile(optimizer, micro_step_id=int(adds), gradient_accumulation_steps=micro_steps):
            result = wrapped(*args, **kwargs)
        if saved is not None:
            offload.add_to_fp32_gradient(optimizer, param_id, saved)
        if boundary:
            self._delivered_this_backward.add(param_id)
            self._undelivered.discard(param_id)
            self._delivered.add(param_id)
        else:
            offload.store_host_sum(optimizer, param)
            self._undelivered.add(param_id)
        return result
