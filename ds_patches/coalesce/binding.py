"""What coalesce is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.places import COORDINATOR, COUNTING, ENGINE, TORCH_STYLE, ZERO3, ZERO12

_BEGINS = "allocates the reduce buffers and counts a micro step"
_OF_HOOKS = "is called by each parameter's hook"


_TARGETS = (
    ENGINE.target("coalesce_grad_reduction", "around_coalesce", adds=True),
    ENGINE.target("no_sync", "around_no_sync"),
)


_DEPENDENCIES = (
    ENGINE.needs("step", "reads what is reduced; wrapped at one engine, as allreduce_gradients"),
    ENGINE.needs(
        "allreduce_gradients",
        "ends a backward; wrapped at an engine whose gradients stay on its parameters",
    ),
    ENGINE.needs("backward", "leaves out a division under no_sync, up to 0.18.2; wrapped likewise"),
    ENGINE.needs(
        "is_gradient_accumulation_boundary", "goes by the flag that a flush raises and puts back"
    ),
    Dependency(
        "deepspeed.runtime.base_optimizer",
        "BackwardHookStateManager",
        "is reset after a backward that raised",
        COUNTING,
    ),
    ZERO12.needs("fill_grad_accum_attribute", "moves a gradient to its fp32 sum, at stage 1"),
    ZERO12.needs("backward", "allocates the reduce buffers that a flush allocates", "<=0.16.4"),
    ZERO12.needs("backward_prologue", _BEGINS, ">=0.16.5,<=0.18.2"),
    ZERO12.needs("setup_buckets", _BEGINS, TORCH_STYLE),
    ZERO12.needs("reduce_ready_partitions_and_remove_grads", "puts a gradient into a bucket"),
    ZERO12.needs("process_gradients", _OF_HOOKS, ">=0.16.5"),
    ZERO12.needs("independent_gradient_partition_epilogue", "hands the averages to the step"),
    ZERO12.needs("copy_grads_in_partition", "with CPU offload, copies the only micro step whole"),
    ZERO12.needs("_release_ipg_buffers", "gives the reduce buffers back"),
    ZERO12.needs("clear_backward_seen_flag", "drops the last step's fp32 sums", COUNTING),
    ZERO3.needs("reduce_ready_partitions_and_remove_grads", _OF_HOOKS),
    ZERO3.needs("independent_gradient_partition_epilogue", "hands the partitions to the step"),
    ZERO3.needs("clear_backward_seen_flag", "moves micro_step_id", COUNTING),
    COORDINATOR.needs("__all_gather_params", "gathers what is partitioned, on its own stream"),
    COORDINATOR.needs("__release_param", "releases one; wrapped while a block holds all"),
    COORDINATOR.needs("__params_to_release", "says what a module may release; wrapped likewise"),
    COORDINATOR.needs("release_sub_module", "leaves every release to __release_param"),
    Dependency(
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload._remove_module_hooks",
        "knows the handles of all hooks that gather",
    ),
    COORDINATOR.needs("release_and_reset_all", "partitions everything, also in a block; wrapped"),
    COORDINATOR.needs("_invalidate_trace", "starts a trace again that an exception cut short"),
    COORDINATOR.needs("reset_step", "compares the traces of all ranks at the next forward"),
    COORDINATOR.needs(
        "release_backward_leftovers", "empties the stack that an exception left", ">=0.19.3"
    ),
)

PATCH = Patch(
    name="coalesce",
    summary="several backwards, one gradient reduction",
    remove_when=(
        "every release you use has coalesce_grad_reduction, and its exit reduces nothing after an "
        "exception; none up to 0.19.8 does both"
    ),
    upstream=upstream("PR 7992"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate="activate",
    deactivate="deactivate",
    requires=("accumulation",),
)
