"""What coalesce is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Class, Dependency, Patch, upstream

_ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
_STAGE3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_FLAT = Class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
_COORDINATOR = Class(
    "deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
)

_HOOKS = "ds_patches.coalesce.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"

_BEGINS = "allocates the reduce buffers and counts a micro step"
_OF_HOOKS = "is called by each parameter's hook"


_TARGETS = (
    _ENGINE.target("coalesce_grad_reduction", f"{_HOOKS}:around_coalesce", adds=True),
    _ENGINE.target("no_sync", f"{_HOOKS}:around_no_sync"),
)


_DEPENDENCIES = (
    _ENGINE.needs("step", "reads what is reduced; shadowed as allreduce_gradients"),
    _ENGINE.needs(
        "allreduce_gradients",
        "ends a backward; shadowed at an engine whose gradients stay on its parameters",
    ),
    _ENGINE.needs(
        "backward", "leaves out a division under no_sync, up to 0.18.2; shadowed likewise"
    ),
    _ENGINE.needs(
        "is_gradient_accumulation_boundary", "goes by the flag that a flush raises and puts back"
    ),
    Dependency(
        "deepspeed.runtime.base_optimizer",
        "BackwardHookStateManager",
        "is reset after a backward that raised",
        _HOOK_STATE,
    ),
    _FLAT.needs("get_param_gradient_attribute", "says where a gradient waits"),
    _FLAT.needs("fill_grad_accum_attribute", "moves a gradient to its fp32 sum, at stage 1"),
    _FLAT.needs("backward", "allocates the reduce buffers that a flush allocates", "<=0.16.4"),
    _FLAT.needs("backward_prologue", _BEGINS, ">=0.16.5,<=0.18.2"),
    _FLAT.needs("setup_buckets", _BEGINS, _TORCH_STYLE),
    _FLAT.needs("reduce_ready_partitions_and_remove_grads", "puts a gradient into a bucket"),
    _FLAT.needs("process_gradients", _OF_HOOKS, ">=0.16.5"),
    _FLAT.needs("independent_gradient_partition_epilogue", "hands the averages to the step"),
    _FLAT.needs("copy_grads_in_partition", "with CPU offload, copies the only micro step whole"),
    _FLAT.needs("average_tensor", "divides by the ranks, then sums, as the reduce-scatter does"),
    _FLAT.needs("get_flat_partition", "cuts the averages as the reduce-scatter's are cut"),
    _FLAT.needs(
        "_build_compact_grad_partition_buffer",
        "keeps the averages of a low precision model in one fp32 piece",
        ">=0.19.8",
    ),
    _FLAT.needs("_release_ipg_buffers", "gives the reduce buffers back"),
    _FLAT.needs("clear_backward_seen_flag", "drops the last step's fp32 sums", _HOOK_STATE),
    _STAGE3.needs("reduce_ready_partitions_and_remove_grads", _OF_HOOKS),
    _STAGE3.needs("independent_gradient_partition_epilogue", "hands the partitions to the step"),
    _STAGE3.needs("clear_backward_seen_flag", "moves micro_step_id", _HOOK_STATE),
    _COORDINATOR.needs("__all_gather_params", "gathers what is partitioned, on its own stream"),
    _COORDINATOR.needs("__release_param", "releases one; shadowed while a block holds all"),
    _COORDINATOR.needs("__params_to_release", "says what a module may release; shadowed likewise"),
    _COORDINATOR.needs("release_sub_module", "leaves every release to __release_param"),
    Dependency(
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload._remove_module_hooks",
        "knows the handles of all hooks that gather",
    ),
    _COORDINATOR.needs("release_and_reset_all", "partitions everything, also in a block; shadowed"),
    _COORDINATOR.needs("_invalidate_trace", "starts a trace again that an exception cut short"),
    _COORDINATOR.needs("reset_step", "compares the traces of all ranks at the next forward"),
    _COORDINATOR.needs(
        "release_backward_leftovers", "empties the stack that an exception left", ">=0.19.3"
    ),
)

PATCH = Patch(
    name="coalesce",
    summary="several backwards, one gradient reduction",
    why="N backwards cost N reductions before 0.19.1; a block that raises is reduced, or hangs.",
    how="Leaves gradients on their parameters until the block ends, and reduces them once.",
    remove_when=(
        "every release you use has coalesce_grad_reduction, and its exit reduces nothing after an "
        "exception; none up to 0.19.8 does both"
    ),
    upstream=upstream("PR 7992"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
    requires=("accumulation",),
)
