"""Stage 3 gradients: partitions and buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from ds_patches.runtime.coordinator import in_flight

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """This rank's flat slice of each parameter's gradient, by ``ds_id``."""
    partitions: dict[int, torch.Tensor] = getattr(optimizer, _STAGE3 + "param_id_to_grad_partition")
    return partitions


def zero(optimizer: Any, ids: Collection[int]) -> None:
    """Zero some parameters' gradients (``ds_id``), an offloaded optimizer's too."""
    partitions = gradient_partitions(optimizer)
    for ds_id in ids:
        partitions[ds_id].zero_()
    for param, host in _on_host(optimizer, ids):
        host.zero_()
        norms = optimizer.norm_for_param_grads
        param_id = optimizer.get_param_id(param)
        if (norm := norms.get(param_id)) is not None:
            norms[param_id] = torch.zeros_like(norm)


def deliver(optimizer: Any, ids: Collection[int]) -> None:
    """Copy gradients to an offloaded optimizer, as a backward at the boundary does."""
    partitions = gradient_partitions(optimizer)
    for param, host in _on_host(optimizer, ids):
        partition = partitions[param.ds_id].view(-1).narrow(0, 0, host.numel())
        host.copy_(partition)
        norm = partition.float().norm(2)
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = norm


def take_back(optimizer: Any, ids: Collection[int]) -> None:
    """Copy an offloaded optimizer's gradients, that a script has written, to where they add up."""
    partitions = gradient_partitions(optimizer)
    for param, host in _on_host(optimizer, ids):
        partitions[param.ds_id].view(-1).narrow(0, 0, host.numel()).copy_(host)
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = host.float().norm(2)


def _on_host(optimizer: Any, ids: Collection[int]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Parameters, and where an offloaded optimizer reads their gradients; not those on NVMe."""
    if not optimizer.offload_optimizer or not ids:
        return
    for param in (param for group in optimizer.fp16_groups for param in group):
        if param.ds_id in ids and param.requires_grad:
            index, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            gradient = optimizer.fp32_partitioned_groups_flat[index].grad
            if gradient is not None:
                yield param, gradient.narrow(0, offset, numel)


def clear(optimizer: Any) -> None:
    """Forget what no reduction has taken from the parameters."""
    for group in optimizer.fp16_groups:
        for param in group:
            param.grad = None


def partition_parameters(optimizer: Any) -> None:
    """Partition every parameter, whoever uses it: a backward that raised left some gathered."""
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    pending = in_flight(coordinator)
    for param in offload.module.parameters():
        # Its gather raised, out of memory say: nobody can wait for it. Its partition is there.
        if param.ds_status.name == "INFLIGHT" and param not in pending:
            param.ds_status = type(param.ds_status).AVAILABLE
    coordinator.release_and_reset_all(offload.module)
    if hasattr(coordinator, "release_backward_leftovers"):  # 0.19.3
        coordinator.release_backward_leftovers()


def empty_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets; the buffers stay."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        optimizer.params_in_ipg_bucket.clear()
        return
    for bucket in buckets.values():
        bucket.params.clear()
        bucket.elements = 0
        if hasattr(bucket, "process_group"):  # 0.19.3
            bucket.process_group = None
