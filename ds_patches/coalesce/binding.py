"""What coalesce is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Dependency, Link, Option, Patch, Target

_ENGINE = "deepspeed.runtime.engine"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_FLAT = "deepspeed.runtime.zero.stage_1_and_2"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"

_HOOKS = "ds_patches.coalesce.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"


def _engine(method: str, wrapper: str, adds: bool = False) -> Target:
    return Target(_ENGINE, f"DeepSpeedEngine.{method}", f"{_HOOKS}:{wrapper}", adds=adds)


_TARGETS = (
    _engine("coalesce_grad_reduction", "around_coalesce", adds=True),
    _engine("no_sync", "around_no_sync"),
)


def _flat_method(name: str, why: str, releases: str = "") -> Dependency:
    return Dependency(_FLAT, f"DeepSpeedZeroOptimizer.{name}", why, releases=releases)


def _stage3_method(name: str, why: str, releases: str = "") -> Dependency:
    return Dependency(_STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{name}", why, releases=releases)


def _coordinator_method(name: str, why: str, releases: str = "") -> Dependency:
    qualname = f"PartitionedParameterCoordinator.{name}"
    return Dependency(_COORDINATOR, qualname, why, releases=releases)


def _offload_method(name: str, why: str) -> Dependency:
    return Dependency(
        "deepspeed.runtime.zero.parameter_offload", f"DeepSpeedZeRoOffload.{name}", why
    )


_DEPENDENCIES = (
    Dependency(
        _ENGINE, "DeepSpeedEngine.step", "reads what is reduced; shadowed as allreduce_gradients"
    ),
    Dependency(
        _ENGINE,
        "DeepSpeedEngine.allreduce_gradients",
        "ends a backward; shadowed at an engine whose gradients stay on its parameters",
    ),
    Dependency(
        _ENGINE,
        "DeepSpeedEngine.backward",
        "leaves out a division under no_sync, up to 0.18.2; shadowed likewise",
    ),
    Dependency(
        _ENGINE,
        "DeepSpeedEngine.is_gradient_accumulation_boundary",
        "goes by the flag that a flush raises and puts back",
    ),
    Dependency(
        "deepspeed.runtime.base_optimizer",
        "BackwardHookStateManager",
        "is reset after a backward that raised",
        releases=_HOOK_STATE,
    ),
    _flat_method("get_param_gradient_attribute", "says where a gradient waits"),
    _flat_method("fill_grad_accum_attribute", "moves a gradient to its fp32 sum, at stage 1"),
    _flat_method("backward", "allocates the reduce buffers that a flush allocates", "<=0.16.4"),
    _flat_method(
        "backward_prologue",
        "allocates the reduce buffers and counts a micro step",
        ">=0.16.5,<=0.18.2",
    ),
    _flat_method(
        "setup_buckets", "allocates the reduce buffers and counts a micro step", _TORCH_STYLE
    ),
    _flat_method("reduce_ready_partitions_and_remove_grads", "puts a gradient into a bucket"),
    _flat_method("process_gradients", "is called by each parameter's hook", ">=0.16.5"),
    _flat_method("independent_gradient_partition_epilogue", "hands the averages to the step"),
    _flat_method("copy_grads_in_partition", "with CPU offload, copies the only micro step whole"),
    _flat_method("average_tensor", "divides by the ranks, then sums, as the reduce-scatter does"),
    _flat_method("get_flat_partition", "cuts the averages as the reduce-scatter's are cut"),
    _flat_method(
        "_build_compact_grad_partition_buffer",
        "keeps the averages of a low precision model in one fp32 piece",
        ">=0.19.8",
    ),
    _flat_method("_release_ipg_buffers", "gives the reduce buffers back"),
    _flat_method("clear_backward_seen_flag", "drops the last step's fp32 sums", _HOOK_STATE),
    _stage3_method(
        "reduce_ready_partitions_and_remove_grads", "is called by each parameter's hook"
    ),
    _stage3_method("independent_gradient_partition_epilogue", "hands the partitions to the step"),
    _stage3_method("clear_backward_seen_flag", "moves micro_step_id", _HOOK_STATE),
    _coordinator_method("__all_gather_params", "gathers what is partitioned, on its own stream"),
    _coordinator_method("__release_param", "leaves alone what some module has in use"),
    _coordinator_method("release_sub_module", "leaves every release to __release_param"),
    _offload_method("_remove_module_hooks", "knows the handles of all hooks that gather"),
    _coordinator_method("release_and_reset_all", "partitions everything after an exception"),
    _coordinator_method("_invalidate_trace", "starts a trace again that an exception cut short"),
    _coordinator_method("reset_step", "compares the traces of all ranks at the next forward"),
    _coordinator_method(
        "release_backward_leftovers", "empties the stack that an exception left", ">=0.19.3"
    ),
)

PATCH = Patch(
    name="coalesce",
    summary="several backwards, one gradient reduction",
    why=(
        "engine.coalesce_grad_reduction() came with 0.19.1. Before it, N backwards per step cost "
        "N reductions on ZeRO-2/3; and it reduces half a window's gradients, or hangs, when "
        "something inside raises. engine.no_sync() is refused there."
    ),
    how=(
        "Leaves gradients on their parameters until the block ends, and reduces them there once. "
        "Ranks leave the block together; one that raised drops its gradients and tells the others."
    ),
    remove_when=(
        "every release you use has coalesce_grad_reduction, and its exit reduces nothing after an "
        "exception; none up to 0.19.8 does both"
    ),
    upstream=(Link("PR 7992", "https://github.com/deepspeedai/DeepSpeed/pull/7992"),),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    options=(
        Option(
            "handshake",
            default="on",
            choices=("on", "store", "off"),
            help=(
                "ranks meet before they reduce, in memory where they are on one host, or else in "
                "the process group's store; off: one that raises alone hangs all"
            ),
        ),
        Option(
            "flush",
            default="reduce_scatter",
            choices=("reduce_scatter", "upstream"),
            help="ZeRO-1/2: reduce-scatter where it is known to be right, or DeepSpeed's own way",
        ),
        Option(
            "no_sync",
            default="on",
            choices=("on", "off"),
            help="engine.no_sync() works at ZeRO 2 and 3; off leaves DeepSpeed's AssertionError",
        ),
    ),
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
    requires=("accumulation",),
)
