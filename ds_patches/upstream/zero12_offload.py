"""Gradients of stages 1 and 2 under CPU offload: host sums and fp32 gradients."""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import live
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import synchronize

#: The optimizer's method that builds the lists of `watch_gradients` anew as a checkpoint loads.
LINKING_METHOD = "_get_offload_gradient_dict"


def fp32_grads(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat fp32 gradients that an offloaded optimizer steps with, by group."""
    return [group.grad for group in optimizer.single_partition_of_fp32_groups]


def host_sums_are_partitions(optimizer: Any) -> bool:
    """Return True if host sums and fp32 gradients share memory: half precision masters."""
    for name in ("low_precision_master_weights_and_grads", "fp16_master_weights_and_gradients"):
        if hasattr(optimizer, name):
            return bool(getattr(optimizer, name))
    return False


@cache
def keeps_host_sums() -> bool:
    """Return True if every backward adds to the host sums (0.19.0, PR 7981).

    Before, only the first micro step was kept on the host; a second one's gradient was lost to the
    third.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    copy = live.innermost(DeepSpeedZeroOptimizer.copy_grads_in_partition)
    return "micro_step_id" in copy.__code__.co_names


def param_ids_due_at_step(optimizer: Any) -> set[int]:
    """Return the mutable set of parameters whose host sums the step is to copy: 0.19.4."""
    param_ids: set[int] = optimizer._offload_accumulated_param_ids
    return param_ids


def store_host_sum(optimizer: Any, param: Any) -> None:
    """Copy a micro step's sum from `param`'s gradient back to the host."""
    param_id = optimizer.get_param_id(param)
    gradient = optimizer.get_param_gradient_attribute(param)
    host_sum = optimizer.accumulated_grads_in_cpu.get(param_id)
    if host_sum is None or gradient is None or keeps_host_sums():
        return
    if host_sum.numel() == gradient.numel():
        host_sum.copy_(gradient.view(-1))
    else:  # half precision masters: the host holds this rank's part only
        _, source_offset, _, numel = optimizer.grad_position[param_id]
        host_sum.copy_(gradient.view(-1).narrow(0, source_offset, numel))


def nonzero_param_ids(optimizer: Any) -> set[int]:
    """Return the ids of the parameters whose fp32 gradients are not zero."""
    return {i for i in optimizer.grad_position if _fp32_gradient(optimizer, i).any()}


#: Called with a parameter's id, and True if its gradient is set, False if it is read.
Notify = Callable[[int, bool], None]


def watch_gradients(optimizer: Any, notify: Notify | None) -> None:
    """Call `notify` before a script reads or sets an fp32 gradient; None stops that."""
    for group, gradients in optimizer.offload_gradient_dict.items():
        ids = [optimizer.get_param_id(param) for param in optimizer.params_in_partition[group]]
        watched = [*gradients] if notify is None else _Watched(gradients, ids, notify)
        optimizer.offload_gradient_dict[group] = watched


class _Watched(list[torch.Tensor]):
    """A group's fp32 gradients; DeepSpeed's ``safe_get_*`` functions index this list."""

    def __init__(self, gradients: Iterable[torch.Tensor], ids: list[int], notify: Notify) -> None:
        super().__init__(gradients)
        self._ids, self._notify = ids, notify

    def __getitem__(self, index: Any) -> Any:
        # Reads and writes both index the list: only the calling function tells them apart.
        callers = (frame.f_code.co_name for frame, _ in islice(walk_stack(sys._getframe()), 8))
        self._notify(self._ids[index], "set_full_hp_grad" in callers)
        return super().__getitem__(index)


def zero_fp32_gradients(optimizer: Any, param_ids: Iterable[int]) -> None:
    """Zero some parameters' fp32 gradients and their norms, which clipping reads."""
    for param_id in param_ids:
        _fp32_gradient(optimizer, param_id).zero_()
        if (norm := optimizer.norm_for_param_grads.get(param_id)) is not None:
            optimizer.norm_for_param_grads[param_id] = torch.zeros_like(norm)


def copy_fp32_gradient(optimizer: Any, param_id: int) -> torch.Tensor | None:
    """Return a copy of a parameter's fp32 gradient, which DeepSpeed is about to overwrite.

    None if the sum is kept on the device, since DeepSpeed then copies the whole sum.
    """
    if _device_sum(optimizer, param_id) is not None:
        return None
    synchronize()
    return _fp32_gradient(optimizer, param_id).clone()


def add_to_fp32_gradient(optimizer: Any, param_id: int, gradient: torch.Tensor) -> None:
    """Add to a parameter's fp32 gradient, and compute its norm again."""
    synchronize()
    _fp32_gradient(optimizer, param_id).add_(gradient)
    renew_norms(optimizer, [param_id])


def add_host_sums(optimizer: Any, param_ids: Iterable[int]) -> None:
    """Add host sums to fp32 gradients, where a backward at the boundary copies; renew norms."""
    for param_id in param_ids:
        target = _fp32_gradient(optimizer, param_id)
        if (sum_ := _device_sum(optimizer, param_id)) is None:
            if (host_sum := optimizer.accumulated_grads_in_cpu.get(param_id)) is None:
                continue
            source_offset = optimizer.grad_position[param_id][1]
            sum_ = host_sum.view(-1).narrow(0, source_offset, target.numel())
        target.add_(sum_)
        optimizer.norm_for_param_grads[param_id] = target.float().norm(2)
        optimizer.local_overflow |= not bool(target.isfinite().all())


def copy_sums_to_device(optimizer: Any, param_ids: Iterable[int]) -> set[int]:
    """Copy fp32 gradients to the device as the sums that the next backward adds to.

    Return the ids of their parameters.
    """
    copied = set()
    for param_id in param_ids:
        if (sum_ := _device_sum(optimizer, param_id)) is not None:
            sum_.copy_(_fp32_gradient(optimizer, param_id))
            copied.add(param_id)
    return copied


def _device_sum(optimizer: Any, param_id: int) -> torch.Tensor | None:
    """Return a parameter's sum on the device, if micro steps are summed there; else None."""
    group, _, _, numel = optimizer.grad_position[param_id]
    if not zero12.sums_in_place(optimizer, group):
        return None
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    part: torch.Tensor = optimizer._get_compact_grad_partition_slice(group, rank, param_id, numel)
    return part


def _fp32_gradient(optimizer: Any, param_id: int) -> torch.Tensor:
    """Return this rank's part of a gradient in the fp32 memory that the step reads."""
    group, _, offset, numel = optimizer.grad_position[param_id]
    gradient: torch.Tensor = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
    return gradient.narrow(0, offset, numel)


def renew_norms(optimizer: Any, param_ids: Iterable[int] | None = None) -> None:
    """Compute the norms, which clipping reads, of some parameters' fp32 gradients, or of all."""
    norms = optimizer.norm_for_param_grads
    for param_id in optimizer.grad_position if param_ids is None else param_ids:
        norm = _fp32_gradient(optimizer, param_id).norm(2)
        like = norms.get(param_id, norm)
        norms[param_id] = norm.to(like.dtype).to(like.device)
