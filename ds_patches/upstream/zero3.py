"""Stage 3: parameters, and the partitions and buckets of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.upstream.accelerator import wait_for_current
from ds_patches.upstream.places import private
from ds_patches.upstream.zero3_gathers import in_flight

_CONTEXTS = "_ds_patches_dc_fallback_contexts"

# --- Parameters -----------------------------------------------------------------------------------


def is_partitioned(param: Any) -> bool:
    """Whether ZeRO-3 has taken `param` in."""
    return hasattr(param, "ds_id")


def below(module: torch.nn.Module) -> list[Any]:
    """Return the parameters of `module` that ZeRO-3 has taken in."""
    return [param for param in module.parameters() if is_partitioned(param)]


def parameters_class() -> type:
    """Return the class in which ZeRO-3 keeps the parameters of each module."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    found: type = ZeROOrderedDict
    return found


def module_of(parameters: Any) -> torch.nn.Module:
    """Return the module whose parameters an object of that class holds."""
    module: torch.nn.Module = parameters._parent_module
    return module


def is_here(param: Any) -> bool:
    """Whether somebody has gathered `param`, as ``GatheredParameters`` does."""
    return bool(param.ds_status.name == "AVAILABLE")


def optimizer_of(param: Any) -> Any:
    """Return what steps a parameter; None for one that nothing trains."""
    return getattr(param, "_z3_optimizer", None)


def is_on_nvme(optimizer: Any) -> bool:
    """Whether parameters are partitioned into files."""
    return bool(getattr(optimizer, "params_in_nvme_and_cpu", False))


def note_partitions(noted: dict[int, tuple[Any, torch.Tensor]], params: Sequence[Any]) -> None:
    """Note a copy of this rank's partition of each that trains, by id; what is noted stays."""
    new = [param for param in params if param.requires_grad and id(param) not in noted]
    noted.update({id(param): (param, param.ds_tensor.detach().clone()) for param in new})


def shape_of(param: Any) -> Sequence[int]:
    """Return the shape of the whole parameter."""
    shape: Sequence[int] = param.ds_shape
    return shape


def give_shape(param: Any) -> None:
    """Let a parameter have its shape, and no values."""
    param.data = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.ds_shape)


def group_of(param: Any) -> Any:
    """Return the ranks that hold the partitions of `param`."""
    return param.ds_process_group


def full_values(params: Sequence[Any]) -> list[torch.Tensor]:
    """Return full values of `params`, in memory that nothing of DeepSpeed refers to. Collective."""
    return [_full_value(param) for param in params]


def _full_value(param: Any) -> torch.Tensor:
    shard = param.ds_tensor.detach().to(param.device, non_blocking=True)  # the CPU may hold it
    ranks = dist.get_world_size(param.ds_process_group)
    padded = torch.empty(ranks * shard.numel(), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(padded, shard, group=param.ds_process_group)
    return padded[: param.ds_numel].view(param.ds_shape)


def after_applied(then: Callable[[torch.nn.Module], None]) -> None:
    """Have `then` see each module that ``Module.apply`` has changed, before ranks are sent it.

    For the ``zero.Init`` that was just entered, and gathers and partitions around it.
    """
    gathering: Any = torch.nn.Module.apply

    @wraps(gathering)
    def apply(module: torch.nn.Module, function: Any) -> Any:
        @wraps(function)
        def changed(one: torch.nn.Module) -> None:
            function(one)
            then(one)

        # Stock marks what it has made of a function: that has one of these inside.
        return gathering(module, function if hasattr(function, "wrapped") else changed)

    torch.nn.Module.apply = apply  # type: ignore[method-assign,assignment]


def release_persistent(optimizer: Any) -> None:
    """Partition what nobody has asked for: compiled frames were traced without it.

    ZeRO-3 gathers small parameters for good, and again after each step; DeepCompile says that none
    is persistent, and gathers by itself.
    """
    for param in optimizer.persistent_parameters:
        if is_here(param) and not param.ds_active_sub_modules and not users_contexts(param):
            param.partition()


def users_contexts(param: Any) -> int:
    """Return how many open ``GatheredParameters`` hold `param`, as `count_context` counts them."""
    return int(getattr(param, _CONTEXTS, 0))


def count_context(params: Sequence[Any], by: int) -> None:
    """A ``GatheredParameters`` over `params` opens (1) or closes (-1)."""
    for param in params:
        setattr(param, _CONTEXTS, users_contexts(param) + by)
        if not users_contexts(param):
            delattr(param, _CONTEXTS)


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


# --- Gradients ------------------------------------------------------------------------------------


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return this rank's flat slice of each parameter's gradient, by ``ds_id``."""
    name = "param_id_to_grad_partition"
    found: dict[int, torch.Tensor] = private(optimizer, "DeepSpeedZeroOptimizer_Stage3", name)
    return found


def zero_all(optimizer: Any) -> None:
    """Zero every partition of a gradient."""
    optimizer.grad_partitions_flat_buffer.zero_()


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


def give_zero_gradient(param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    partitioned = param.data
    # PyTorch takes a gradient in the shape of the data only, and that is released.
    param.data = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
    param.grad = torch.zeros_like(param.data)
    param.data = partitioned


def clear(optimizer: Any) -> None:
    """Forget what no reduction has taken from the parameters."""
    for group in optimizer.fp16_groups:
        for param in group:
            param.grad = None


def in_buckets(optimizer: Any) -> list[Any]:
    """Return the parameters whose gradients wait in the reduce buckets."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        return [*optimizer.params_in_ipg_bucket]
    return [param for bucket in buckets.values() for param in bucket.params]


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


def dtype_to_send(optimizer: Any, grad: torch.Tensor) -> torch.dtype:
    """Return what gradients are reduced in."""
    chosen: torch.dtype | None = getattr(optimizer, "communication_data_type", None)
    return chosen if chosen is not None else grad.dtype


def order_step_behind(optimizer: Any) -> None:
    """Have the optimizer's check for overflow wait for what is queued on the current stream.

    It looks at the partitions on the stream that ZeRO-3's own reductions run on.
    """
    wait_for_current(optimizer.reduce_and_partition_stream)
