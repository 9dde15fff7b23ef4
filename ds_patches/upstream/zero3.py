"""Stage 3: parameters, and the partitions and buckets of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.upstream.accelerator import accelerator, keeps_order, wait_for_current
from ds_patches.upstream.classes import ZERO3, private, private_name
from ds_patches.upstream.zero3_gathers import in_flight

#: Of a parameter: a ``GatheredParameters`` is open that holds it.
IN_CONTEXT = "_ds_patches_in_context"

# --- Parameters -----------------------------------------------------------------------------------


def is_partitioned(param: Any) -> bool:
    """Return True if ZeRO-3 has taken `param` in."""
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
    """Return True if somebody has gathered `param`, as ``GatheredParameters`` does."""
    return bool(param.ds_status.name == "AVAILABLE")


def drop_secondary(param: Any) -> None:
    """Drop hpZ's copy of a parameter, from which forwards would gather old weights."""
    if getattr(param, "ds_secondary_tensor", None) is not None:
        param.ds_secondary_tensor = None


def optimizers_of(gathered: Any) -> set[Any]:
    """Return the optimizers that train the parameters of a ``GatheredParameters``."""
    params = gathered.params if gathered.enabled else ()
    return {getattr(param, "_z3_optimizer", None) for param in params} - {None}


def full_value(param: Any) -> torch.Tensor:
    """All-gather a parameter into memory that nothing of DeepSpeed refers to. Collective."""
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
        if is_here(param) and not (param.ds_active_sub_modules or hasattr(param, IN_CONTEXT)):
            param.partition()


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
    found: dict[int, torch.Tensor] = private(optimizer, ZERO3, "param_id_to_grad_partition")
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


def hand_over(optimizer: Any, params: Sequence[Any]) -> None:
    """Give the step the gradients of parameters that are frozen now, for which it has zeros."""
    if not params:
        return
    places = {id(p): (g, i) for g, ps in enumerate(optimizer.fp16_groups) for i, p in enumerate(ps)}
    partitions = gradient_partitions(optimizer)
    for param in params:
        group, index = places[id(param)]
        optimizer.averaged_gradients[group][index] = partitions[param.ds_id]


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
        if param.ds_id in ids:
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
    if not hasattr(optimizer, "ipg_buckets"):  # 0.16.0-0.17.1
        return [*optimizer.params_in_ipg_bucket]
    return [param for bucket in optimizer.ipg_buckets.values() for param in bucket.params]


#: Methods: one reduces a bucket, or to 0.17.1 the only one; then one puts a gradient into it.
REDUCING_METHOD = private_name(ZERO3, "reduce_and_partition_ipg_grads")
PUTTING_METHOD = private_name(ZERO3, "add_grad_to_ipg_bucket")


def dtype_of_bucket(
    optimizer: Any, communication_data_type: torch.dtype | None = None, **_: Any
) -> torch.dtype | None:
    """Return the dtype that `REDUCING_METHOD` is called with; None to 0.17.1."""
    return communication_data_type if hasattr(optimizer, "ipg_buckets") else None


def bucket_of(optimizer: Any, comm_dtype: torch.dtype | None = None) -> list[Any]:
    """Return the parameters in the reduce bucket of a dtype, or to 0.17.1 in the only one."""
    params: list[Any]
    if comm_dtype is None:
        params = optimizer.params_in_ipg_bucket
    else:
        params = optimizer.ipg_buckets[comm_dtype].params
    return params


def hold_each_once(optimizer: Any, comm_dtype: torch.dtype | None = None) -> None:
    """Put each parameter of a bucket into it once: autograd has added its gradients up."""
    params = bucket_of(optimizer, comm_dtype)
    once = list(dict.fromkeys(params))
    with reduction_stream(optimizer):
        for param in once:  # whose gradient is in the bucket's memory
            param.grad.data = param.grad.data.clone()
    params.clear()
    if comm_dtype is not None:
        optimizer.ipg_buckets[comm_dtype].elements = 0
    for param in once:
        getattr(optimizer, PUTTING_METHOD)(param)


def reduction_waits(optimizer: Any) -> None:
    """Make the stream that gradients are reduced on wait for the current stream.

    The optimizer's check for overflow looks at the partitions on it, too.
    """
    wait_for_current(optimizer.reduce_and_partition_stream)


@contextmanager
def reduction_stream(optimizer: Any) -> Iterator[None]:
    """Queue work behind that of the current stream, on the stream that reduces."""
    reduction_waits(optimizer)
    if keeps_order():
        yield
        return
    with accelerator().stream(optimizer.reduce_and_partition_stream):
        yield


def wait_for_buckets(optimizer: Any, module: Any = None) -> None:
    """Make the current stream wait if a gradient of the module's parameters is in a bucket.

    It was copied there on the stream that reduces, and autograd adds the next one to it on this.
    None: of any parameter's.
    """
    held = {id(param) for param in in_buckets(optimizer)}
    if module is not None:
        external = (param for _, param in module.ds_external_parameters())
        held &= {id(param) for param in (*module.parameters(), *external)}
    if held:
        accelerator().current_stream().wait_stream(optimizer.reduce_and_partition_stream)


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
