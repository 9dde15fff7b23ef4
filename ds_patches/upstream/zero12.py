"""Gradients of stages 1 and 2: averaged, pending, and in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.layer import Layer
from ds_patches.upstream.accelerator import accelerator
from ds_patches.upstream.boundary import is_at_boundary
from ds_patches.upstream.kinds import Kind, kind_of

Gradients = dict[int, list[torch.Tensor] | None]  # by parameter group

INITIAL_MICRO_STEP_ID = -1  # before a step's first backward


def pending_gradients(optimizer: Any) -> Gradients:
    """Reduced gradients of micro steps before the boundary; a store of its own from 0.17.6."""
    pending: Gradients = getattr(optimizer, "all_grad_tensors", {})
    return pending


def sums_in_place(optimizer: Any, group: int) -> bool:
    """Whether the optimizer itself adds up fp32 gradients of a low precision group: 0.19.8."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and bool(compact(group))


def any_sums_in_place(optimizer: Any) -> bool:
    """Whether any group sums in place: a backward at the boundary then delivers the whole step."""
    return any(sums_in_place(optimizer, group) for group in range(len(optimizer.bit16_groups)))


def reduces_last_backward_only(optimizer: Any) -> bool:
    """Whether gradients that the step's last backward does not reach are never reduced.

    So it is at stage 1 with overlap_comm: the sums of earlier micro steps are dropped.
    """
    return bool(optimizer.overlap_comm) and not optimizer.partition_gradients


def reduce_earlier_backwards(optimizer: Any) -> None:
    """Reduce what `reduces_last_backward_only` leaves out, in the last backward of a step."""
    if not is_at_boundary(optimizer):
        return
    left = _left(optimizer)
    if not left:  # as in most steps, which are not to pay for each parameter
        return
    attribute = gradient_attribute(optimizer)
    for index, group in enumerate(optimizer.bit16_groups):
        for param in group:
            number = optimizer.get_param_id(param)
            if number not in left or getattr(param, attribute, None) is None:
                continue
            # Where ranks reduce in one order, an earlier one may have brought it along.
            if number in _left(optimizer):
                optimizer.reduce_ready_partitions_and_remove_grads(param, index)


def _left(optimizer: Any) -> set[int]:
    waiting = {entry[-1] for entry in in_buckets(optimizer)}
    reduced = optimizer.params_already_reduced
    return {i for i, done in enumerate(reduced) if not done and i not in waiting}


def in_buckets(optimizer: Any) -> list[tuple[Any, ...]]:
    """Return DeepSpeed's notes of the parameters in the reduce buckets; a number ends each."""
    buckets = getattr(optimizer, "ipg_buckets", None)  # 0.17.2
    if buckets is None:
        return [*optimizer.params_in_ipg_bucket]
    return [entry for bucket in buckets.values() for entry in bucket.params]


def forgets_micro_steps(optimizer: Any) -> bool:
    """Whether each micro step of ZeRO-2 replaces the one before: 0.17.6 to 0.18.2.

    Those releases look for earlier ones in the wrong place.
    """
    return (
        hasattr(optimizer, "all_grad_tensors")
        and not hasattr(optimizer, "setup_buckets")  # 0.18.3
        and kind_of(optimizer) is Kind.ZERO12
    )


def add_to_earlier(
    collect: Callable[..., list[torch.Tensor]], optimizer: Any, params: Any, *rest: Any
) -> list[torch.Tensor]:
    """Collect what a backward reduced, as DeepSpeed does, and add it to earlier micro steps."""
    now = collect(params, *rest)
    groups = (group for group, own in enumerate(optimizer.params_in_partition) if own is params)
    earlier = pending_gradients(optimizer).get(next(groups, -1))
    if earlier is None:
        return now
    for sum_, gradient in zip(earlier, now, strict=True):
        sum_.add_(gradient)
    return earlier


def steps_with_local_sums(optimizer: Any) -> bool:
    """Whether a rank steps with its own fp32 sums, and reduces low precision copies for nothing.

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
            if param.requires_grad and param.grad_accum is not None:
                param.grad, param.grad_accum = optimizer.get_gradient_for_reduction(param), None
    with meanwhile(optimizer, use_grad_accum_attribute=False):
        yield


def give_zeros(optimizer: Any) -> None:
    """Give a step zeros for gradients."""
    for group, size in enumerate(optimizer.partition_size):
        device = optimizer.bit16_groups_flat[group].device
        dtype = getattr(optimizer, "gradient_accumulation_dtype", None) or optimizer.dtype
        optimizer.averaged_gradients[group] = [torch.zeros(int(size), dtype=dtype, device=device)]


def keeps_earlier_micro_steps(optimizer: Any) -> bool:
    """Whether DeepSpeed's zero_grad() keeps the gradients of earlier micro steps.

    It drops them at stage 1 without fp32 sums, where they are the parameters' ``grad``.
    """
    return bool(optimizer.partition_gradients or optimizer.use_grad_accum_attribute)


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


def is_whole(param: Any) -> bool:
    """Whether a parameter's gradient is complete: a tiled computation brings it in pieces."""
    return bool(getattr(param, "ds_grad_is_ready", True))


def only_whole(optimizer: Any) -> Layer:
    """Keep incomplete gradients out of the buckets, as 0.18.6 does. They exist from 0.17.0 on."""

    def put(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        param, *_ = in_order(wrapped, args, kwargs)
        if is_whole(param):
            wrapped(*args, **kwargs)

    return Layer(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", put)


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


def release_buffers(optimizer: Any) -> None:
    """Give back the memory of the reduce buckets."""
    optimizer._release_ipg_buffers()


def empty_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets, and their buffers."""
    forget_buckets(optimizer)
    release_buffers(optimizer)
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
