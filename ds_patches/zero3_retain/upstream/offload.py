"""Gradients of stages 1 and 2 under CPU offload: host sums and fp32 partitions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ds_patches.core import device, live


def partitions(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 gradients that an offloaded optimizer reads in `step`, stages 1 and 2."""
    if not optimizer.cpu_offload:
        return []
    return [group.grad for group in optimizer.single_partition_of_fp32_groups]


def overwrites(optimizer: Any) -> bool:
    """With CPU offload, a boundary backward copies over the fp32 gradients.

    What it copies holds the earlier backwards if the host sums do, or if the partition sums in
    place.
    """
    if not optimizer.cpu_offload:
        return False
    if any(sums_in_place(optimizer, group) for group in range(len(optimizer.bit16_groups))):
        return False
    return optimizer.gradient_accumulation_steps == 1 or not keeps_host_sums()


@cache
def keeps_host_sums() -> bool:
    """Whether the host sums grow with every backward (0.19.0, PR 7981).

    Before, only the first micro step was kept on the host: what a second one added was lost to
    the third.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    copy = live.innermost(DeepSpeedZeroOptimizer.copy_grads_in_partition)
    return "micro_step_id" in copy.__code__.co_names


def host_sums(optimizer: Any) -> dict[int, torch.Tensor]:
    """With CPU offload, the sum over a parameter's micro steps, on the host."""
    return optimizer.accumulated_grads_in_cpu if optimizer.cpu_offload else {}


def zero_host_sum(optimizer: Any, param_id: int) -> None:
    """Forget what earlier micro steps left on the host for one parameter."""
    if (host_sum := optimizer.accumulated_grads_in_cpu.get(param_id)) is not None:
        host_sum.zero_()


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


def zero_partitions(optimizer: Any, *, all_but: set[int]) -> None:
    """Zero the fp32 gradients of parameters that got none in this step: an old step left some."""
    for param_id, (group, _, offset, numel) in optimizer.grad_position.items():
        if param_id not in all_but:
            gradient = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
            gradient.narrow(0, offset, numel).zero_()


def finish_copies() -> None:
    """Wait for gradients that still travel to the host."""
    device.synchronize()


def renew_norms(optimizer: Any) -> None:
    """Let the per-parameter norms, which clipping reads, follow the fp32 gradients."""
    norms = optimizer.norm_for_param_grads
    for param_id, (group, _, offset, numel) in optimizer.grad_position.items():
        gradient = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
        previous = norms.get(param_id)
        if previous is not None:
            norm = gradient.narrow(0, offset, numel).norm(2)
            norms[param_id] = norm.to(previous.dtype).to(previous.device)


def sums_in_place(optimizer: Any, group: int) -> bool:
    """0.19.8 adds reduced gradients of a low precision model to an fp32 partition by itself."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and bool(compact(group))
