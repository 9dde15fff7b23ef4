"""Stage 3: parameters, and the partitions and reduce buckets of their gradients."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.upstream.accelerator import accelerator, wait_for_current
from ds_patches.upstream.classes import ZERO3, private, private_name
from ds_patches.upstream.zero3_gathers import in_flight

#: The attribute of a parameter that an open ``GatheredParameters`` holds.
IN_CONTEXT = "_ds_patches_in_context"

# --- Parameters -----------------------------------------------------------------------------------


def partitioned_params(module: torch.nn.Module) -> list[Any]:
    """Return the parameters of `module` that ZeRO-3 manages, also those that are gathered now."""
    return [param for param in module.parameters() if hasattr(param, "ds_id")]


def is_available(param: Any) -> bool:
    """Return True if `param` is gathered, for example by ``GatheredParameters``."""
    return bool(param.ds_status.name == "AVAILABLE")


def drop_secondary(param: Any) -> None:
    """Drop hpZ's secondary partition, from which forwards would gather old weights."""
    if getattr(param, "ds_secondary_tensor", None) is not None:
        param.ds_secondary_tensor = None


def optimizers_of(gathered: Any) -> set[Any]:
    """Return the optimizers that train the parameters of a ``GatheredParameters``."""
    params = gathered.params if gathered.enabled else ()
    return {getattr(param, "_z3_optimizer", None) for param in params} - {None}


def broadcasts(gathered: Any) -> bool:
    """Return True if a ``GatheredParameters`` ends by a broadcast of what one rank has written."""
    return gathered.src_rank is not None


def full_value(param: Any) -> torch.Tensor:
    """All-gather a parameter into new memory, to which DeepSpeed holds no reference. Collective.

    Returns a tensor of its shape and dtype, on its device.
    """
    # The partition may be offloaded to the CPU.
    shard = param.ds_tensor.detach().to(param.device, non_blocking=True)
    ranks = dist.get_world_size(param.ds_process_group)
    padded = torch.empty(ranks * shard.numel(), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(padded, shard, group=param.ds_process_group)
    return padded[: param.ds_numel].view(param.ds_shape)


def release_persistent(optimizer: Any) -> None:
    """Partition unused persistent parameters: compiled frames were traced without them.

    ZeRO-3 keeps small parameters gathered, and gathers them again after each step. DeepCompile
    treats none as persistent, and gathers by itself.
    """
    for param in optimizer.persistent_parameters:
        if is_available(param) and not (param.ds_active_sub_modules or hasattr(param, IN_CONTEXT)):
            param.partition()


def partition_parameters(optimizer: Any) -> None:
    """Partition every parameter, in use or not, after a backward that raised."""
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    pending = in_flight(coordinator)
    for param in offload.module.parameters():
        # Its all-gather raised, and there is no handle to wait for. Its partition is intact.
        if param.ds_status.name == "INFLIGHT" and param not in pending:
            param.ds_status = type(param.ds_status).AVAILABLE
    coordinator.release_and_reset_all(offload.module)
    if hasattr(coordinator, "release_backward_leftovers"):  # 0.19.3
        coordinator.release_backward_leftovers()


# --- Gradients ------------------------------------------------------------------------------------


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return this rank's flat part of each parameter's gradient, by ``ds_id``."""
    partitions: dict[int, torch.Tensor] = private(ZERO3, optimizer, "param_id_to_grad_partition")
    return partitions


def zero_gradients(optimizer: Any, ids: Collection[int]) -> None:
    """Zero some parameters' gradients (by ``ds_id``), an offloaded optimizer's too."""
    partitions = gradient_partitions(optimizer)
    for ds_id in ids:
        partitions[ds_id].zero_()
    for param_id, _, host in _host_gradients(optimizer, ids):
        host.zero_()
        norms = optimizer.norm_for_param_grads
        if (norm := norms.get(param_id)) is not None:
            norms[param_id] = torch.zeros_like(norm)


def copy_to_host(optimizer: Any, ids: Collection[int]) -> None:
    """Copy gradients to an offloaded optimizer, as a backward at the boundary does."""
    for param_id, partition, host in _host_gradients(optimizer, ids):
        host.copy_(partition)
        optimizer.norm_for_param_grads[param_id] = partition.float().norm(2)


def set_averages(optimizer: Any, ids: Collection[int]) -> None:
    """Set the averaged gradients of parameters to their partitions, by ``ds_id``.

    DeepSpeed set zeros for parameters that were frozen when the last backward ended.
    """
    partitions = gradient_partitions(optimizer)
    for group, params in enumerate(optimizer.fp16_groups):
        averages = optimizer.averaged_gradients.get(group)
        for index, param in enumerate(params if averages else ()):
            if param.ds_id in ids:
                averages[index] = partitions[param.ds_id]


def set_missing_averages(optimizer: Any) -> None:
    """Set the averaged gradients of all parameters to their partitions, if a backward set none."""
    partitions = gradient_partitions(optimizer)
    for group, params in enumerate(optimizer.fp16_groups):
        if not optimizer.averaged_gradients.get(group):
            optimizer.averaged_gradients[group] = [partitions[param.ds_id] for param in params]


def zero_all_gradients(optimizer: Any) -> None:
    """Zero all gradient partitions."""
    optimizer.grad_partitions_flat_buffer.zero_()


def copy_from_host(optimizer: Any, ids: Collection[int]) -> None:
    """Copy gradients that a script set in an offloaded optimizer to the partitions."""
    for param_id, partition, host in _host_gradients(optimizer, ids):
        partition.copy_(host)
        optimizer.norm_for_param_grads[param_id] = host.float().norm(2)


def _host_gradients(
    optimizer: Any, ids: Collection[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield ids of parameters, their partitions, and an offloaded optimizer's gradients of them."""
    if not optimizer.offload_optimizer or not ids:
        return
    for param in (param for group in optimizer.fp16_groups for param in group):
        if param.ds_id in ids:
            param_id = optimizer.get_param_id(param)
            index, offset, numel = optimizer.grad_position[param_id]
            gradient = optimizer.fp32_partitioned_groups_flat[index].grad
            if gradient is not None:
                partition = gradient_partitions(optimizer)[param.ds_id].view(-1)
                yield param_id, partition[:numel], gradient.narrow(0, offset, numel)


def set_zero_gradient(param: Any) -> None:
    """Set a parameter's gradient to zeros, so that it takes part in the reduction."""
    partitioned = param.data
    # PyTorch accepts a gradient only in the shape of the data, which is partitioned.
    param.data = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
    param.grad = torch.zeros_like(param.data)
    param.data = partitioned


def clear_gradients(optimizer: Any) -> None:
    """Drop the gradients on the parameters."""
    for group in optimizer.fp16_groups:
        for param in group:
            param.grad = None


def buckets(optimizer: Any) -> dict[torch.dtype | None, Any]:
    """Return the reduce buckets: by dtype from 0.17.2 on, one by None before."""
    if not hasattr(optimizer, "ipg_buckets"):
        return {None: SimpleNamespace(params=optimizer.params_in_ipg_bucket)}
    by_dtype: dict[torch.dtype | None, Any] = optimizer.ipg_buckets
    return by_dtype


def params_in_buckets(optimizer: Any) -> list[Any]:
    """Return the parameters whose gradients are in the reduce buckets."""
    return [param for bucket in buckets(optimizer).values() for param in bucket.params]


#: Names of methods: the first reduces a bucket, the second copies a gradient into one.
REDUCING_METHOD = private_name(ZERO3, "reduce_and_partition_ipg_grads")
BUCKETING_METHOD = private_name(ZERO3, "add_grad_to_ipg_bucket")


def bucket_of(optimizer: Any, communication_data_type: torch.dtype | None = None) -> Any:
    """Return the bucket that a call of `REDUCING_METHOD` with these arguments reduces."""
    return buckets(optimizer)[communication_data_type]


def deduplicate_bucket(optimizer: Any, bucket: Any) -> None:
    """Keep one entry for each parameter of a bucket: autograd has summed its gradients."""
    unique_params = list(dict.fromkeys(bucket.params))
    with reduction_stream(optimizer):
        for param in unique_params:  # their gradients are in the bucket's memory
            param.grad.data = param.grad.data.clone()
    bucket.params.clear()
    bucket.elements = 0
    for param in unique_params:
        getattr(optimizer, BUCKETING_METHOD)(param)


def make_reduction_wait(optimizer: Any) -> None:
    """Make the reduction stream wait for the current stream.

    The optimizer's overflow check reads the gradient partitions on it, too.
    """
    wait_for_current(optimizer.reduce_and_partition_stream)


@contextmanager
def reduction_stream(optimizer: Any) -> Iterator[None]:
    """Run work on the reduction stream, behind the current stream."""
    make_reduction_wait(optimizer)
    with accelerator().stream(optimizer.reduce_and_partition_stream):
        yield


def wait_for_buckets(optimizer: Any, module: Any = None) -> None:
    """Make the current stream wait if a gradient of the module's parameters is in a bucket.

    The reduction stream copied it there, and autograd adds the next gradient to it on the current
    stream. module: None for all parameters.
    """
    held = {id(param) for param in params_in_buckets(optimizer)}
    if module is not None:
        external = (param for _, param in module.ds_external_parameters())
        held &= {id(param) for param in (*module.parameters(), *external)}
    if held:
        accelerator().current_stream().wait_stream(optimizer.reduce_and_partition_stream)


def empty_buckets(optimizer: Any) -> None:
    """Drop the gradients in the reduce buckets; the buffers stay."""
    for bucket in buckets(optimizer).values():
        bucket.params.clear()
        bucket.elements = 0
        if hasattr(bucket, "process_group"):  # 0.19.3
            bucket.process_group = None
