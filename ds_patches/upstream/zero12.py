"""Gradients of stages 1 and 2: averaged, pending, and in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_patches.core.calls import meanwhile
from ds_patches.upstream.accelerator import accelerator
from ds_patches.upstream.boundary import is_at_boundary

Gradients = dict[int, list[torch.Tensor] | None]  # by parameter group

INITIAL_MICRO_STEP_ID = -1  # before a step's first backward


def pending_gradients(optimizer: Any) -> Gradients:
    """Reduced gradients of micro steps before the boundary; a store of its own from 0.17.6."""
    pending: Gradients = getattr(optimizer, "all_grad_tensors", {})
    return pending


def sums_in_place(optimizer: Any, group: int) -> bool:
    """Return True if the optimizer adds up fp32 gradients of a low precision group: 0.19.8."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and bool(compact(group))


def any_sums_in_place(optimizer: Any) -> bool:
    """Return True if a group does: a backward at the boundary then delivers the whole step."""
    return any(sums_in_place(optimizer, group) for group in range(len(optimizer.bit16_groups)))


def add_to_earlier(
    collect: Callable[..., list[torch.Tensor]], optimizer: Any, params: Any, *rest: Any
) -> list[torch.Tensor]:
    """Collect what a backward reduced, as DeepSpeed does, and add it to earlier micro steps.

    0.17.6 to 0.18.2 look for those in the wrong place, and replace them.
    """
    now = collect(params, *rest)
    groups = (group for group, own in enumerate(optimizer.params_in_partition) if own is params)
    earlier = pending_gradients(optimizer).get(next(groups, -1))
    if earlier is None:
        return now
    for sum_, gradient in zip(earlier, now, strict=True):
        sum_.add_(gradient)
    return earlier


def steps_with_local_sums(optimizer: Any) -> bool:
    """Return True if a rank steps with its own fp32 sums, and reduces copies for nothing.

    So it is up to 0.19.7 at stage 1 with fp32 sums of a low precision model and an offloaded
    optimizer.
    """
    return bool(
        optimizer.use_grad_accum_attribute
        and optimizer.cpu_offload
        and not any_sums_in_place(optimizer)
    )


@contextmanager
def averaging_local_sums(optimizer: Any) -> Iterator[None]:
    """Have the step take the averaged copies, where it `steps_with_local_sums`."""
    if not (steps_with_local_sums(optimizer) and is_at_boundary(optimizer)):
        yield
        return
    for group in optimizer.bit16_groups:
        for param in group:
            if param.grad_accum is not None:
                param.grad, param.grad_accum = optimizer.get_gradient_for_reduction(param), None
    with meanwhile(optimizer, use_grad_accum_attribute=False):
        yield


def give_zeros(optimizer: Any) -> None:
    """Give a step zeros for gradients."""
    for group, size in enumerate(optimizer.partition_size):
        device = optimizer.bit16_groups_flat[group].device
        dtype = getattr(optimizer, "gradient_accumulation_dtype", None) or optimizer.dtype
        optimizer.averaged_gradients[group] = [torch.zeros(int(size), dtype=dtype, device=device)]


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Buckets of one dtype each, of what can be flattened into a reduce buffer."""
    buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            buckets.setdefault(tensor.dtype, []).append(tensor)
    return list(buckets.values())


def gradient_attribute(optimizer: Any) -> str:
    """Return the parameters' attribute that has a gradient before it is reduced."""
    return "grad_accum" if optimizer.use_grad_accum_attribute else "grad"


def clear(optimizer: Any) -> None:
    """Drop the gradients that lie on the parameters."""
    for group in optimizer.bit16_groups:
        for param in group:
            param.grad = None
            param.grad_accum = None


def give_zero_gradient(optimizer: Any, param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    if optimizer.use_grad_accum_attribute:
        param.grad_accum = torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype)
    else:
        param.grad = torch.zeros_like(param)


def set_up_buckets(optimizer: Any) -> None:
    """Allocate the reduce buffers, unless they are there."""
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


def forget_buckets(optimizer: Any) -> None:
    """Forget which gradients wait in the reduce buckets."""
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


def clear_nothing_later(optimizer: Any) -> None:
    """Empty the list of gradients that the next reduction clears.

    They are of other ranks, with overlap_comm and without contiguous_gradients.
    """
    later = optimizer.previous_reduced_grads
    for params in later.values() if isinstance(later, dict) else [later or []]:
        params.clear()


def release_buffers(optimizer: Any) -> None:
    """Give back the memory of the reduce buckets."""
    optimizer._release_ipg_buffers()


def empty_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets, and their buffers."""
    forget_buckets(optimizer)
    release_buffers(optimizer)
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
