"""Every private name of DeepSpeed that this patch touches, and how it differs by release.

The rest of the patch speaks of gathering, buckets and partitions; where those live in
0.16.0 ... 0.19.8 is said here and nowhere else. Differences are told by structure, not by version
number: source builds carry any number they like.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_patches.core import live

_COORDINATOR = "_PartitionedParameterCoordinator__"
_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__"
_LEAF_INPUTS = "_leaf_module_inputs_remaining"

INITIAL_MICRO_STEP_ID = -1  # stages 1 and 2, before a step's first backward


# --- the engine ---------------------------------------------------------------------------------


def why_not_covered(engine: Any) -> str | None:
    """None if the patch covers `engine`; else the reason, empty where there is nothing to cover."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if not engine.zero_optimization() or not hasattr(optimizer, "step"):
        return ""  # no ZeRO, or inference only
    covered = (BF16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    if type(optimizer) not in covered:
        return f"its optimizer is {type(optimizer).__name__}, which reduces in a way of its own"
    return None


def has_torch_style_backward(engine: Any) -> bool:
    """Whether ``loss.backward()`` without the engine works: 0.18.3 and later."""
    return hasattr(engine, "_backward_post_hook")


def runs_compiled_backward(engine: Any) -> bool:
    """DeepCompile took the gathers and the reduction into its graphs (0.16.6 and later)."""
    active = getattr(engine, "is_deepcompile_active", None)
    if active is not None:
        return bool(active())
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    return enabled is not None and bool(enabled() and engine.is_compiled)


def begin_backward_again(engine: Any) -> None:
    """Do for a second backward over one forward what a forward and a first backward do.

    From 0.18.3 hooks on the engine's outputs run the prologue, once per forward. From 0.18.5 a
    forward also resets the per-step hook state, without which the epilogue of the second backward
    is never queued.
    """
    if not has_torch_style_backward(engine):
        return
    reset = getattr(engine.optimizer, "clear_backward_seen_flag", None)
    if reset is not None:
        reset()
    engine._backward_prologue()


def reached_no_parameter(engine: Any) -> bool:
    """Whether the graph task that ends here produced no parameter's gradient (0.18.5 and later)."""
    optimizer = engine.optimizer
    return not engine._running_engine_backward and optimizer._hooks_fired_this_backward == 0


def end_without_epilogue(engine: Any) -> None:
    """Leave the backward that the prologue entered."""
    engine.optimizer.exit_backward()
    engine._stop_timers(engine.engine_timers.backward_inner_timers)
    engine._stop_timers(engine.engine_timers.backward_timers)


def forget_backward(engine: Any) -> None:
    """Clear what a backward that raised left behind in the engine and its hook state."""
    optimizer = engine.optimizer
    if not has_torch_style_backward(engine):
        return
    optimizer._backward_active_depth = 0
    optimizer._remaining_grad_acc_hooks = 0
    reset = getattr(optimizer, "clear_backward_seen_flag", None)
    if reset is not None:
        optimizer._epilogue_ran_this_backward = False
        reset()
    if not hasattr(engine, "_running_engine_backward_count"):  # 0.18.3-0.19.5: a flag, no finally
        engine._running_engine_backward = False
    engine._manual_backward_expected = False


# --- stage 3: parameters ------------------------------------------------------------------------


def registered_modules(offload: Any) -> Iterator[torch.nn.Module]:
    """Modules whose hooks `offload` set: all but what lies inside a z3 leaf module."""
    from deepspeed.utils import z3_leaf_module

    pending = [offload.module]
    while pending:
        module = pending.pop()
        yield module
        if not z3_leaf_module(module):
            pending.extend(module.children())


def leaf_inputs(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, int]:
    """Inputs whose gradient each z3 leaf module awaits before it reduces its parameters'.

    Releases up to 0.17.5 count them down from the forward on; later ones use a module hook.
    """
    awaited = ((module, vars(module).get(_LEAF_INPUTS)) for module in modules)
    return {module: count for module, count in awaited if count is not None}


def restore_leaf_inputs(awaited: dict[torch.nn.Module, int]) -> None:
    """Let a later backward await the same inputs as the first."""
    for module, count in awaited.items():
        setattr(module, _LEAF_INPUTS, count)


def releasable_parameters(offload: Any) -> Iterator[Any]:
    """Gathered parameters that nobody may keep.

    Not the persistent, the external, those of a running module, nor what was prefetched: a
    coalesced prefetch ends for all its parameters at once, so one may be gathered already while
    the registry still has it in flight.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    coordinator = offload.get_param_coordinator()
    in_flight = getattr(coordinator, _COORDINATOR + "inflight_param_registry")
    for param in offload.module.parameters():
        if (
            param.ds_status == ZeroParamStatus.AVAILABLE
            and not param.ds_persist
            and not param.is_external_param
            and not param.ds_active_sub_modules
            and param not in in_flight
        ):
            yield param


def holds_backward_fetch(coordinator: Any, module: torch.nn.Module) -> bool:
    """Whether a release of `module` is still owed: from 0.19.3 the epilogue may have done it."""
    active = getattr(coordinator, _COORDINATOR + "active_backward_submodules", None)
    return active is None or module.ds_id in active


def release_parameter(coordinator: Any, param: Any) -> None:
    """Partition `param` again, and take it off the coordinator's count of gathered elements."""
    getattr(coordinator, _COORDINATOR + "release_param")(param)


def rewind_prefetch(coordinator: Any) -> None:
    """Let the prefetcher see the rest of the trace again.

    It drops a use from its queue when the parameter is gathered at that moment. Between the
    backwards of one forward everything is released, so uses that it dropped would be fetched one
    by one. A complete trace holds them all; the queue restarts at the present step of it.
    """
    if not coordinator.is_complete_trace():
        return
    step_id = getattr(coordinator, _COORDINATOR + "step_id")
    order = getattr(coordinator, _COORDINATOR + "param_order")
    rest = deque(use for use in order if use.step_id_last_used_at >= step_id)
    setattr(coordinator, _COORDINATOR + "param_queue", rest)
    last_fetched: defaultdict[Any, int] = defaultdict(lambda: int(-1e10))
    setattr(coordinator, _COORDINATOR + "most_recent_step_id_param_fetched_for", last_fetched)


# --- stage 3: gradients -------------------------------------------------------------------------


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """This rank's flat slice of each parameter's gradient, by ``ds_id``."""
    partitions: dict[int, torch.Tensor] = getattr(
        optimizer, _STAGE3 + "param_id_to_grad_partition"
    )
    return partitions


def offloaded_gradients(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 gradients that an offloaded optimizer reads in `step`, stage 3."""
    if not optimizer.offload_optimizer:
        return []
    flat = (group.grad for group in optimizer.fp32_partitioned_groups_flat)
    return [grad for grad in flat if grad is not None]


def offloaded_norms(optimizer: Any) -> dict[int, Any]:
    """Norm of each parameter's gradient, kept by an offloaded stage 3 optimizer only."""
    norms: dict[int, Any] = getattr(optimizer, "norm_for_param_grads", {})
    return norms


def empty_stage3_buckets(optimizer: Any) -> None:
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


# --- stages 1 and 2: gradients ------------------------------------------------------------------


def keeps_its_own_sum(optimizer: Any) -> bool:
    """bf16 parameters with fp32 gradients at stage 1: ``BF16_Optimizer``, whose fp32 gradients
    add up by themselves once every backward has its prologue."""
    return hasattr(optimizer, "clear_hp_grads")


def sums_in_place(optimizer: Any, group: int) -> bool:
    """0.19.8 adds reduced gradients of a low precision model to an fp32 partition by itself."""
    compact = getattr(optimizer, "_use_compact_grad_partition_buffer", None)
    return compact is not None and bool(compact(group))


def at_boundary(optimizer: Any) -> bool:
    """Whether this backward ends a gradient accumulation: attribute, from 0.19.5 a method."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def pending_gradients(optimizer: Any) -> dict[int, list[torch.Tensor] | None]:
    """Reduced gradients of micro steps before the boundary; a store of its own from 0.17.6."""
    pending: dict[int, list[torch.Tensor] | None] = getattr(optimizer, "all_grad_tensors", {})
    return pending


def replaced(optimizer: Any, before: dict[int, list[torch.Tensor] | None]) -> bool:
    """Whether an epilogue put new gradients where `before` held some of the same step."""
    if optimizer.cpu_offload:
        return overwrites_offloaded(optimizer)
    now = optimizer.averaged_gradients
    return any(old is not None and now.get(group) is not old for group, old in before.items())


def offloaded_partitions(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 gradients that an offloaded optimizer reads in `step`, stages 1 and 2."""
    if not optimizer.cpu_offload:
        return []
    return [group.grad for group in optimizer.single_partition_of_fp32_groups]


def host_sums(optimizer: Any) -> dict[int, torch.Tensor]:
    """With CPU offload, the sum over a parameter's micro steps, on the host."""
    return optimizer.accumulated_grads_in_cpu if optimizer.cpu_offload else {}


def zero_host_sum(optimizer: Any, param_id: int) -> None:
    """Forget what earlier micro steps left on the host for one parameter."""
    if (host_sum := optimizer.accumulated_grads_in_cpu.get(param_id)) is not None:
        host_sum.zero_()


def zero_offloaded(optimizer: Any, *, all_but: set[int]) -> None:
    """Zero the fp32 gradients of parameters that got none in this step: an old step left some."""
    for param_id, (group, _, offset, numel) in optimizer.grad_position.items():
        if param_id not in all_but:
            gradient = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
            gradient.narrow(0, offset, numel).zero_()


def keeps_host_sums() -> bool:
    """Whether the host sums grow with every backward (0.19.0, PR 7981).

    Before, only the first micro step was kept on the host: what a second one added was lost to
    the third.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    copy = live.innermost(DeepSpeedZeroOptimizer.copy_grads_in_partition)
    return "micro_step_id" in copy.__code__.co_names


def overwrites_offloaded(optimizer: Any) -> bool:
    """With CPU offload, a boundary backward copies over the fp32 gradients.

    What it copies holds the earlier backwards if the host sums do, or if the partition sums in
    place.
    """
    if not optimizer.cpu_offload:
        return False
    if any(sums_in_place(optimizer, group) for group in range(len(optimizer.bit16_groups))):
        return False
    return optimizer.gradient_accumulation_steps == 1 or not keeps_host_sums()


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


def finish_offload_copies() -> None:
    """Wait for gradients that still travel to the host."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not accelerator.is_synchronized_device():
        accelerator.synchronize()


def renew_offloaded_norms(optimizer: Any) -> None:
    """Let the per-parameter norms, which clipping reads, follow the fp32 gradients."""
    norms = optimizer.norm_for_param_grads
    for param_id, (group, _, offset, numel) in optimizer.grad_position.items():
        gradient = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
        previous = norms.get(param_id)
        if previous is not None:
            norm = gradient.narrow(0, offset, numel).norm(2)
            norms[param_id] = norm.to(previous.dtype).to(previous.device)


def empty_flat_buckets(optimizer: Any) -> None:
    """Drop gradients that wait in the reduce buckets of stages 1 and 2, and their buffers."""
    buckets = getattr(optimizer, "ipg_buckets", None)
    if buckets is None:  # 0.16.0-0.17.1
        optimizer.grads_in_ipg_bucket = []
        optimizer.params_in_ipg_bucket = []
        optimizer.elements_in_ipg_bucket = 0
        optimizer.ipg_bucket_has_moe_params = False
    else:
        for bucket in buckets.values():
            bucket.clear()
    optimizer._release_ipg_buffers()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
