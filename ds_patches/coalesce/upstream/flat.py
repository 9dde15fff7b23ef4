"""Gradients of stages 1 and 2: where they wait, how they are reduced, what a step leaves over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ds_patches.core import live
from ds_patches.core.attributes import meanwhile
from ds_patches.core.device import accelerator, keeps_order, synchronize

_EPILOGUE = "_ds_patches_coalesce_epilogue"
_BEFORE_FIRST_BACKWARD = -1  # micro_step_id, before a step's first backward


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


def settle(optimizer: Any) -> None:
    """Bring gradients that wait in ``grad`` to where they are summed.

    The epilogue of each backward does, but not every backward has one: from 0.18.3 the second
    ``loss.backward()`` over one forward has none.
    """
    if optimizer.use_grad_accum_attribute:
        optimizer.fill_grad_accum_attribute()


def give_zeros(optimizer: Any, param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    if optimizer.use_grad_accum_attribute:
        param.grad_accum = torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype)
    else:
        param.grad = torch.zeros_like(param)


def reduce(optimizer: Any) -> None:
    """Reduce what waits on the parameters, by upstream's own reducer, as a step's only backward.

    `begin_only_backward` comes first. As the only one it has micro_step_id 0 and is at the
    boundary: with an offloaded optimizer, every release then copies it to the host whole.
    """
    if optimizer.overlap_comm and not keeps_order():
        optimizer.reduction_stream.synchronize()  # what an earlier step left in the buckets
    with _reducing_what_it_steps_with(optimizer):
        _set_up_buckets(optimizer)
        for index, param in parameters(optimizer):
            if optimizer.get_gradient_for_reduction(param) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(param, index)
        optimizer.overlapping_partition_gradients_reduce_epilogue()


@contextmanager
def _reducing_what_it_steps_with(optimizer: Any) -> Iterator[None]:
    """Let upstream reduce the gradient that it then steps with.

    Up to 0.19.7 stage 1 with fp32 sums (and an offloaded optimizer, without which this is not its
    own) reduces a low precision copy of each sum, and steps with the sum, which only this rank has.
    """
    sums = [param for _, param in parameters(optimizer) if gradient(optimizer, param) is not None]
    if not sums or optimizer.get_gradient_for_reduction(sums[0]) is gradient(optimizer, sums[0]):
        yield
        return
    for param in sums:
        param.grad = optimizer.get_gradient_for_reduction(param)
        param.grad_accum = None
    with meanwhile(optimizer, use_grad_accum_attribute=False):
        yield


def _set_up_buckets(optimizer: Any) -> None:
    """Allocate the reduce buffers, as a backward does."""
    if hasattr(optimizer, "setup_buckets"):  # 0.18.3
        optimizer.setup_buckets()
    elif hasattr(optimizer, "process_gradients"):  # 0.16.5
        optimizer.backward_prologue()
    elif optimizer.contiguous_gradients:
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
    clear(optimizer)
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = _BEFORE_FIRST_BACKWARD


def clear(optimizer: Any) -> None:
    """Forget the gradients on the parameters."""
    for group in optimizer.bit16_groups:
        for param in group:
            clear_of(param)


def clear_of(param: Any) -> None:
    """Forget the gradient of one parameter."""
    param.grad = None
    param.grad_accum = None


def reduced(optimizer: Any) -> dict[int, list[torch.Tensor]]:
    """What `step` would read now, by group; a reduction that follows leaves these tensors alone."""
    if optimizer.cpu_offload:
        _finish_copies()
        return {group: [host.clone()] for group, host in enumerate(_on_host(optimizer))}
    averaged = optimizer.averaged_gradients
    return {group: list(held) for group, held in averaged.items() if held is not None}


def add_reduced(optimizer: Any, before: dict[int, list[torch.Tensor]]) -> None:
    """Add what `reduced` gave before a reduction to what the reduction left for `step`."""
    if not optimizer.cpu_offload:
        for group, held in before.items():
            for now, then in zip(optimizer.averaged_gradients[group], held, strict=True):
                now.add_(then)
        return
    _finish_copies()
    for group, host in enumerate(_on_host(optimizer)):
        host.add_(before[group][0])
    _renew_norms(optimizer)


def _on_host(optimizer: Any) -> list[torch.Tensor]:
    return [partition.grad for partition in optimizer.single_partition_of_fp32_groups]


def _renew_norms(optimizer: Any) -> None:
    """Let the norms that clipping reads with an offloaded optimizer follow the gradients there."""
    norms = optimizer.norm_for_param_grads
    for param_id, (group, _, offset, numel) in optimizer.grad_position.items():
        if (norm := norms.get(param_id)) is not None:
            gradient = _on_host(optimizer)[group].view(-1).narrow(0, offset, numel)
            norms[param_id] = gradient.norm(2).to(norm.dtype).to(norm.device)


def _finish_copies() -> None:
    """Wait for gradients that still travel to the host."""
    synchronize()


@contextmanager
def in_epilogue(optimizer: Any) -> Iterator[None]:
    """Around upstream's epilogue, which up to 0.18.4 ends with a ``zero_grad()`` of its own."""
    vars(optimizer)[_EPILOGUE] = True
    try:
        yield
    finally:
        del vars(optimizer)[_EPILOGUE]


def is_in_epilogue(optimizer: Any) -> bool:
    return _EPILOGUE in vars(optimizer)


def is_offloaded(optimizer: Any) -> bool:
    return bool(optimizer.cpu_offload)


def offload_loses(optimizer: Any, backward: int, boundaries: list[int]) -> bool:
    """Whether a boundary backward, the step's n-th, left a gradient out of what `step` reads.

    With an offloaded optimizer it copies over what was there. `boundaries`: which backwards before
    it did so. Host sums keep the others, with gradient_accumulation_steps above 1 from 0.19.0 on,
    before that only the first one's; with 1, from 0.19.0 on, all but that of a boundary backward
    which was its step's first.
    """
    if not optimizer.cpu_offload or _sums_in_place(optimizer):
        return False
    if optimizer.gradient_accumulation_steps > 1:
        return backward > 2 and not _keeps_host_sums()
    return 1 in boundaries if _keeps_host_sums() else backward > 1


@cache
def _keeps_host_sums() -> bool:
    """Whether the host sums grow with every backward (0.19.0, PR 7981)."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    copy = live.innermost(DeepSpeedZeroOptimizer.copy_grads_in_partition)
    return "micro_step_id" in copy.__code__.co_names


def _sums_in_place(optimizer: Any) -> bool:
    """0.19.8 adds reduced gradients of a low precision model to an fp32 partition by itself."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and any(map(compact, range(len(optimizer.bit16_groups))))


def forgets_micro_steps(optimizer: Any) -> bool:
    """Whether this release looks for earlier micro steps where they are not: 0.17.6 to 0.18.2."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return (
        hasattr(optimizer, "all_grad_tensors")
        and not hasattr(optimizer, "setup_buckets")  # 0.18.3
        and type(optimizer) is DeepSpeedZeroOptimizer  # ZenFlow's is a subclass
        and "muon" not in type(optimizer.optimizer).__name__.lower()  # steps inside the epilogue
    )


def earlier_micro_steps(optimizer: Any, params: Any) -> list[torch.Tensor] | None:
    """What waits for the boundary beside the averaged gradients, of the group with `params`."""
    for group, known in enumerate(optimizer.params_in_partition):
        if known is params:
            earlier: list[torch.Tensor] | None = optimizer.all_grad_tensors.get(group)
            return earlier
    return None


def begin_only_backward(optimizer: Any) -> None:
    """Let what follows be its step's only backward: drop what was reduced before in this step."""
    for gradients in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for group in gradients:
            gradients[group] = None
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = 0


def zero_offloaded(optimizer: Any, param: Any) -> None:
    """Zero `param` in the host gradients that an offloaded optimizer reads in `step`.

    No release does: a parameter without a gradient would step with that of an older step.
    """
    if not optimizer.cpu_offload:
        return
    param_id = optimizer.get_param_id(param)
    if (position := optimizer.grad_position.get(param_id)) is None:
        return  # no part of it is this rank's
    group, _, offset, numel = position
    host = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
    host.narrow(0, offset, numel).zero_()
    if (norm := optimizer.norm_for_param_grads.get(param_id)) is not None:
        optimizer.norm_for_param_grads[param_id] = torch.zeros_like(norm)
