"""Gradients of stages 1 and 2 under CPU offload: host sums and fp32 partitions."""

from __future__ import annotations

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

#: Of the optimizer's methods, the one that fills what `watch` watches, when a checkpoint is loaded.
LINKING_METHOD = "_get_offload_gradient_dict"


def partitions(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 gradients that an offloaded optimizer reads in `step`, stages 1 and 2."""
    return [group.grad for group in optimizer.single_partition_of_fp32_groups]


def sums_in_partitions(optimizer: Any) -> bool:
    """Half precision masters: the host sums are the partitions' own memory."""
    for name in ("low_precision_master_weights_and_grads", "fp16_master_weights_and_gradients"):
        if hasattr(optimizer, name):
            return bool(getattr(optimizer, name))
    return False


@cache
def keeps_host_sums() -> bool:
    """Return True if the host sums grow with every backward (0.19.0, PR 7981).

    Before, only the first micro step was kept on the host: what a second one added was lost to
    the third.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    copy = live.innermost(DeepSpeedZeroOptimizer.copy_grads_in_partition)
    return "micro_step_id" in copy.__code__.co_names


def where_micro_steps_are_kept(optimizer: Any) -> dict[str, int]:
    """Return the attributes with which a micro step that the user sets apart is kept.

    Up to 0.18.9 only counted ones are.
    """
    if optimizer.gradient_accumulation_steps > 1 or keeps_host_sums():
        return {}
    return {"gradient_accumulation_steps": 2}


def due_at_step(optimizer: Any) -> set[int]:
    """Return whose host sums a step that is its own boundary copies; to be changed. 0.19.4."""
    found: set[int] = optimizer._offload_accumulated_param_ids
    return found


def store_host_sum(optimizer: Any, param: Any) -> None:
    """Write the sum that a micro step made in `param`'s gradient back to the host."""
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


def filled(optimizer: Any) -> set[int]:
    """Return the parameters whose fp32 gradients are not zero."""
    return {i for i in optimizer.grad_position if _on_host(optimizer, i).any()}


#: Gets the id of a parameter, and whether its gradient is given; else it is read.
Look = Callable[[int, bool], None]


def watch(optimizer: Any, look: Look | None) -> None:
    """Call `look` before a script reads or gives an fp32 gradient; None: no longer."""
    for group, gradients in optimizer.offload_gradient_dict.items():
        ids = [optimizer.get_param_id(param) for param in optimizer.params_in_partition[group]]
        watched = [*gradients] if look is None else _Watched(gradients, ids, look)
        optimizer.offload_gradient_dict[group] = watched


class _Watched(list[torch.Tensor]):
    """A group's fp32 gradients, from which upstream's functions of a parameter take one."""

    def __init__(self, gradients: Iterable[torch.Tensor], ids: list[int], look: Look) -> None:
        super().__init__(gradients)
        self._ids, self._look = ids, look

    def __getitem__(self, index: Any) -> Any:
        # Reading and giving are the same here, and only the callers tell which it is.
        callers = (frame.f_code.co_name for frame, _ in islice(walk_stack(sys._getframe()), 8))
        self._look(self._ids[index], "set_full_hp_grad" in callers)
        return super().__getitem__(index)


def zero_partitions(optimizer: Any, param_ids: Iterable[int]) -> None:
    """Zero the fp32 gradients of parameters that got none in this step: an old step left some."""
    for param_id in param_ids:
        _on_host(optimizer, param_id).zero_()
        if (norm := optimizer.norm_for_param_grads.get(param_id)) is not None:
            optimizer.norm_for_param_grads[param_id] = torch.zeros_like(norm)


def take_from_partition(optimizer: Any, param_id: int) -> torch.Tensor | None:
    """Return a copy of a parameter's fp32 gradient, which DeepSpeed is about to overwrite.

    None where sums are kept on the device: DeepSpeed copies the whole sum.
    """
    if _on_device(optimizer, param_id) is not None:
        return None
    synchronize()
    return _on_host(optimizer, param_id).clone()


def add_to_partition(optimizer: Any, param_id: int, gradient: torch.Tensor) -> None:
    """Add an fp32 gradient to a parameter's, and renew its norm."""
    synchronize()
    _on_host(optimizer, param_id).add_(gradient)
    renew_norms(optimizer, [param_id])


def add_host_sums(optimizer: Any, param_ids: Iterable[int]) -> None:
    """Add host sums to the fp32 gradients, where a backward at the boundary copies them."""
    for param_id in param_ids:
        target = _on_host(optimizer, param_id)
        if (sum_ := _on_device(optimizer, param_id)) is None:
            if (host_sum := optimizer.accumulated_grads_in_cpu.get(param_id)) is None:
                continue
            source_offset = optimizer.grad_position[param_id][1]
            sum_ = host_sum.view(-1).narrow(0, source_offset, target.numel())
        target.add_(sum_)
        optimizer.norm_for_param_grads[param_id] = target.float().norm(2)
        optimizer.local_overflow |= not bool(target.isfinite().all())


def take_to_device(optimizer: Any, param_ids: Iterable[int]) -> set[int]:
    """Copy fp32 gradients to the device as the sums that the next backward adds to.

    Return the ids of their parameters.
    """
    taken = set()
    for param_id in param_ids:
        if (sum_ := _on_device(optimizer, param_id)) is not None:
            sum_.copy_(_on_host(optimizer, param_id))
            taken.add(param_id)
    return taken


def _on_device(optimizer: Any, param_id: int) -> torch.Tensor | None:
    """Return a parameter's sum on the device, where micro steps add up there; else None."""
    group, _, _, numel = optimizer.grad_position[param_id]
    if not zero12.sums_in_place(optimizer, group):
        return None
    rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
    found: torch.Tensor = optimizer._get_compact_grad_partition_slice(group, rank, param_id, numel)
    return found


def _on_host(optimizer: Any, param_id: int) -> torch.Tensor:
    """Return the fp32 memory from which the step reads this rank's part of a gradient."""
    group, _, offset, numel = optimizer.grad_position[param_id]
    gradient: torch.Tensor = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
    return gradient.narrow(0, offset, numel)


def renew_norms(optimizer: Any, param_ids: Iterable[int] | None = None) -> None:
    """Compute the norms, which clipping reads, of some parameters' fp32 gradients, or of all."""
    norms = optimizer.norm_for_param_grads
    for param_id in optimizer.grad_position if param_ids is None else param_ids:
        norm = _on_host(optimizer, param_id).norm(2)
        like = norms.get(param_id, norm)
        norms[param_id] = norm.to(like.dtype).to(like.device)
