"""Gradients of stages 1 and 2: averaged, pending until the boundary, and in reduce buckets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_patches.core.calls import meanwhile
from ds_patches.upstream.accelerator import accelerator
from ds_patches.upstream.boundary import is_at_boundary

Gradients = dict[int, list[torch.Tensor] | None]  # by parameter group

INITIAL_MICRO_STEP_ID = -1  # until a step's first backward


def pending_gradients(optimizer: Any) -> Gradients:
    """Return the reduced gradients of micro steps before the boundary: 0.17.6 and later."""
    pending: Gradients = getattr(optimizer, "all_grad_tensors", {})
    return pending


def sums_in_place(optimizer: Any, group: int) -> bool:
    """Return True if the optimizer sums a group's gradients in their fp32 partition: 0.19.8."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and bool(compact(group))


def any_sums_in_place(optimizer: Any) -> bool:
    """Return True if a group does: a backward at the boundary then delivers the whole step."""
    return any(sums_in_place(optimizer, group) for group in range(len(optimizer.bit16_groups)))


def collect_and_add(
    collect: Callable[..., list[torch.Tensor]], optimizer: Any, params: Any, *args: Any
) -> list[torch.Tensor]:
    """Collect a backward's reduced gradients, as DeepSpeed does, and add earlier micro steps'.

    0.17.6 to 0.18.2 look for those in the wrong place, and replace them.
    """
    collected = collect(params, *args)
    groups = (group for group, owned in enumerate(optimizer.params_in_partition) if owned is params)
    accumulated = pending_gradients(optimizer).get(next(groups, -1))
    if accumulated is None:
        return collected
    for sum_, gradient in zip(accumulated, collected, strict=True):
        sum_.add_(gradient)
    return accumulated


def steps_with_local_sums(optimizer: Any) -> bool:
    """Return True if a rank steps with its own fp32 sums, and drops the averaged copies.

    Up to 0.19.7 it does at stage 1 with fp32 sums of a low precision model and an offloaded
    optimizer.
    """
    return bool(
        optimizer.use_grad_accum_attribute
        and optimizer.cpu_offload
        and not any_sums_in_place(optimizer)
    )


@contextmanager
def averaging_local_sums(optimizer: Any) -> Iterator[None]:
    """Make the step use the averaged copies, for optimizers that `steps_with_local_sums`."""
    if not (steps_with_local_sums(optimizer) and is_at_boundary(optimizer)):
        yield
        return
    for group in optimizer.bit16_groups:
        for param in group:
            if param.grad_accum is not None:
                param.grad, param.grad_accum = optimizer.get_gradient_for_reduction(param), None
    with meanwhile(optimizer, use_grad_accum_attribute=False):
        yield


def set_zero_averages(optimizer: Any) -> None:
    """Set the averaged gradients to zeros."""
    for group, size in enumerate(optimizer.partition_size):
        device = optimizer.bit16_groups_flat[group].device
        dtype = getattr(optimizer, "gradient_accumulation_dtype", None) or optimizer.dtype
        optimizer.averaged_gradients[group] = [torch.zeros(int(size), dtype=dtype, device=device)]


def bucket_by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return buckets of one dtype each, without tensors that cannot be flattened."""
    buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            buckets.setdefault(tensor.dtype, []).append(tensor)
    return list(buckets.values())


def gradient_attribute(optimizer: Any) -> str:
    """Return the name of the parameters' attribute that holds unreduced gradients."""
    return "grad_accum" if optimizer.use_grad_accum_attribute else "grad"


def clear_gradients(optimizer: Any) -> None:
    """Drop the gradients on the parameters."""
    for group in optimizer.bit16_groups:
        for param in group:
            param.grad = None
            param.grad_accum = None


def set_zero_gradient(optimizer: Any, param: Any) -> None:
    """Set a parameter's gradient to zeros, so that it takes part in the reduction."""
    dtype = optimizer.gradient_accumulation_dtype if optimizer.use_grad_accum_attribute else None
    setattr(param, gradient_attribute(optimizer), torch.zeros_like(param, dtype=dtype))


def clear_previous_gradients(optimizer: Any) -> None:
    """Empty the list of gradients that DeepSpeed clears at the next reduction.

    They are other ranks' gradients, with overlap_comm and without contiguous_gradients.
    """
    previous = optimizer.previous_reduced_grads
    for params in previous.values() if isinstance(previous, dict) else [previous or []]:
        params.clear()


def set_up_buckets(optimizer: Any) -> None:
    """Allocate the reduce buffers, unless they are allocated."""
    if hasattr(optimizer, "setup_buckets"):  # 0.18.3
        optimizer.setup_buckets()
    elif hasattr(optimizer, "process_gradients"):  # 0.16.5
        optimizer.backward_prologue()
    elif optimizer.contiguous_gradients and optimizer.ipg_buffer is None:
        size, device = int(optimizer.reduce_bucket_size), accelerator().current_device_name()
        optimizer.ipg_buffer = [
            torch.empty(size, dtype=optimizer.dtype, device=device)
            for _ in range(2 if optimizer.overlap_comm else 1)
        ]
        optimizer.ipg_index = 0


def reset_buckets(optimizer: Any) -> None:
    """Remove all entries from the reduce buckets; their buffers stay."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        optimizer.grads_in_ipg_bucket = []
        optimizer.params_in_ipg_bucket = []
        optimizer.elements_in_ipg_bucket = 0
        optimizer.ipg_bucket_has_moe_params = False
        optimizer.extra_large_param_to_reduce = None
    else:
        for bucket in buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()


def release_buffers(optimizer: Any) -> None:
    """Free the memory of the reduce buckets."""
    optimizer._release_ipg_buffers()


def empty_buckets(optimizer: Any) -> None:
    """Drop the gradients in the reduce buckets, and their buffers."""
    reset_buckets(optimizer)
    release_buffers(optimizer)
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
