"""Gradients and gathered parameters of stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_COORDINATOR = "_PartitionedParameterCoordinator__"


def parameters(optimizer: Any) -> Iterator[Any]:
    """Trainable parameters."""
    for group in optimizer.fp16_groups:
        yield from (param for param in group if param.requires_grad)


def give_zeros(param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    partitioned = param.data
    # PyTorch takes a gradient in the shape of the data only, and that is released.
    param.data = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
    param.grad = torch.zeros_like(param.data)
    param.data = partitioned


def reduce(optimizer: Any, adds: bool = False) -> None:
    """Reduce what waits on the parameters, by upstream's own reducer, as a step's only backward.

    As the only one it has micro_step_id 0: the partitions are overwritten, whatever they held.
    `adds`: they are added to.
    """
    optimizer.micro_step_id = int(adds)
    for param in parameters(optimizer):
        if param.grad is not None:
            optimizer.reduce_ready_partitions_and_remove_grads(param)
    optimizer.independent_gradient_partition_epilogue()


def clear(optimizer: Any) -> None:
    """Forget the gradients on the parameters."""
    for group in optimizer.fp16_groups:
        for param in group:
            param.grad = None


def drop(optimizer: Any) -> None:
    """Forget the gradients on the parameters, and that there was a backward."""
    clear(optimizer)
    optimizer.micro_step_id = 0


def zero_partition(optimizer: Any, param: Any) -> None:
    """Zero `param` in the gradients that `step` reads.

    No release does: a parameter without a gradient would step with that of an older step.
    """
    getattr(optimizer, _PARTITIONS)[param.ds_id].zero_()
    if not optimizer.offload_optimizer:
        return
    param_id = optimizer.get_param_id(param)
    index, offset, numel = optimizer.grad_position[param_id]
    host = optimizer.fp32_partitioned_groups_flat[index].grad
    if host is not None:
        host.narrow(0, offset, numel).zero_()
    if (norm := optimizer.norm_for_param_grads.get(param_id)) is not None:
        optimizer.norm_for_param_grads[param_id] = torch.zeros_like(norm)


# --- Gathered parameters ------------------------------------------------------------------------


def has_secondary_partitions(engine: Any) -> bool:
    """ZeRO++ hpZ: a backward gathers from a copy that the forward's release makes."""
    return int(engine.zero_hpz_partition_size()) > 1


def release_gathered(optimizer: Any) -> None:
    """Partition what is gathered, but for the persistent and the external parameters."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    release = getattr(coordinator, _COORDINATOR + "release_param")
    for param in optimizer.parameter_offload.module.parameters():
        if not param.ds_persist and not param.is_external_param:
            release(param)


def reset_gathers(optimizer: Any) -> None:
    """Partition every parameter and begin a new trace, after a forward or backward that raised.

    A trace that was being recorded ends in the middle; on another rank it may end elsewhere.
    """
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    coordinator.release_and_reset_all(offload.module)
    if hasattr(coordinator, "release_backward_leftovers"):  # 0.19.3
        coordinator.release_backward_leftovers()
    if not coordinator.is_complete_trace() and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for module in offload.module.modules():
        # Gathers and releases that the backward still owed: the next forward counts from zero.
        for count in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
            if count in vars(module):
                setattr(module, count, 0)
