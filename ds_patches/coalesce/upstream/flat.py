"""Gradients of stages 1 and 2: where they wait, how they are reduced, what a step leaves over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_patches.accumulation.upstream import flat as accumulated
from ds_patches.runtime.device import accelerator, keeps_order


def parameters(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Trainable parameters with the index of their group."""
    for index, group in enumerate(optimizer.bit16_groups):
        for param in group:
            if param.requires_grad:
                yield index, param


def gradient(optimizer: Any, param: Any) -> torch.Tensor | None:
    """What `param` has gathered so far, in ``grad`` or, at stage 1 with fp32 sums of a low
    precision model, in ``grad_accum``."""
    found: torch.Tensor | None = optimizer.get_param_gradient_attribute(param)
    return found


def bring_to_sums(optimizer: Any) -> None:
    """Bring gradients that wait in ``grad`` to where they are summed.

    The epilogue of each backward does, but not every backward has one: from 0.18.3 the second
    ``loss.backward()`` over one forward has none.
    """
    if optimizer.use_grad_accum_attribute:
        optimizer.fill_grad_accum_attribute()


def reduce(optimizer: Any) -> None:
    """Reduce what waits on the parameters, by upstream's own reducer, as one backward; clear it.

    It has micro_step_id 0 and is at the boundary: with an offloaded optimizer, every release then
    copies it to the host whole.
    """
    if optimizer.overlap_comm and not keeps_order():
        optimizer.reduction_stream.synchronize()  # what an earlier step left in the buckets
    optimizer._release_ipg_buffers()
    with accumulated.reducing_what_it_steps_with(optimizer):
        _set_up_buckets(optimizer)
        for index, param in parameters(optimizer):
            if optimizer.get_gradient_for_reduction(param) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(param, index)
        optimizer.overlapping_partition_gradients_reduce_epilogue()
    accumulated.clear(optimizer)


def _set_up_buckets(optimizer: Any) -> None:
    """Allocate the reduce buffers, as a backward does."""
    accumulated.set_up_buckets(optimizer)
    if not hasattr(optimizer, "process_gradients") and optimizer.contiguous_gradients:  # to 0.16.4
        size = int(optimizer.reduce_bucket_size)
        device = accelerator().current_device_name()
        optimizer.ipg_buffer = [
            torch.empty(size, dtype=optimizer.dtype, device=device)
            for _ in range(2 if optimizer.overlap_comm else 1)
        ]
        optimizer.ipg_index = 0
    optimizer.micro_step_id = 0


def drop(optimizer: Any) -> None:
    """Forget the gradients on the parameters, and that there was a backward."""
    accumulated.clear(optimizer)
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = accumulated.INITIAL_MICRO_STEP_ID
