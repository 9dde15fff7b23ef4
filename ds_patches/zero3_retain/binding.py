"""What zero3_retain is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Fact, Link, Option, Patch, Target

_ENGINE = "deepspeed.runtime.engine"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_FLAT = "deepspeed.runtime.zero.stage_1_and_2"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"

_HOOKS = "ds_patches.zero3_retain.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"
_BUCKET_CLASSES = ">=0.17.2"


def _engine(method: str, wrapper: str, releases: str = "") -> Target:
    return Target(_ENGINE, f"DeepSpeedEngine.{method}", f"{_HOOKS}:{wrapper}", releases=releases)


def _stage3(method: str, wrapper: str) -> Target:
    return Target(_STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{method}", f"{_HOOKS}:{wrapper}")


def _flat(method: str, wrapper: str) -> Target:
    return Target(_FLAT, f"DeepSpeedZeroOptimizer.{method}", f"{_HOOKS}:{wrapper}")


def _register(method: str, releases: str) -> Target:
    return Target(
        _OFFLOAD,
        f"DeepSpeedZeRoOffload.{method}",
        f"{_HOOKS}:around_register",
        releases=releases,
    )


_TARGETS = (
    _engine("forward", "around_forward"),
    _engine("backward", "around_backward"),
    _engine("scale", "around_scale", releases=_TORCH_STYLE),
    _engine("_backward_post_hook", "around_post_hook", releases=_HOOK_STATE),
    _engine("zero_grad", "around_zero_grad"),
    _engine("_take_model_step", "around_model_step"),
    _register("_register_hooks_recursively", "<=0.16.3"),
    _register("_register_deepspeed_module", ">=0.16.4"),
    _stage3("partition_grads", "around_partition_grads"),
    _stage3("zero_grad", "around_zero_grad"),
    _flat("independent_gradient_partition_epilogue", "around_flat_epilogue"),
    _flat("copy_grads_in_partition", "around_copy_to_partition"),
    _flat("zero_grad", "around_zero_grad"),
)

_FACTS = (
    Fact(
        _OFFLOAD,
        "DeepSpeedZeRoOffload.pre_sub_module_backward_function",
        "gathers a module before its backward and records the fetch in the trace",
    ),
    Fact(
        _OFFLOAD,
        "DeepSpeedZeRoOffload.post_sub_module_backward_function",
        "releases a module after its backward",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator.fetch_sub_module",
        "reads the prefetch queue that a repeated backward rewinds",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        "reads the prefetch queue that a repeated backward rewinds",
        releases=">=0.18.6",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator.reset_step",
        "fills the prefetch queue from the trace, as the rewind does",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_sub_module",
        "from 0.19.3 insists on an active backward fetch",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_and_reset_all",
        "partitions everything again after a backward that raised",
    ),
    Fact(
        _COORDINATOR,
        "PartitionedParameterCoordinator.__release_param",
        "partitions one parameter and keeps the count of gathered elements",
    ),
    Fact(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue",
        "hands the partition buffers to the step, whether written or not",
    ),
    Fact(
        _FLAT,
        "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu",
        "with CPU offload, adds to host buffers that no step clears",
    ),
    Fact(
        _FLAT,
        "DeepSpeedZeroOptimizer._release_ipg_buffers",
        "gives the reduce buffers back after a backward that raised",
    ),
    Fact(
        _FLAT,
        "IPGBucket",
        "holds the gradients that a backward that raised left unreduced",
        releases=_BUCKET_CLASSES,
    ),
    Fact(
        _STAGE3,
        "IPGBucketZ3",
        "holds the gradients that a backward that raised left unreduced",
        releases=_BUCKET_CLASSES,
    ),
    Fact(
        "deepspeed.runtime.bf16_optimizer",
        "BF16_Optimizer.update_hp_grads",
        "adds each backward's bf16 gradients to the fp32 ones",
    ),
    Fact(
        _ENGINE,
        "DeepSpeedEngine._backward_prologue",
        "what the output hooks run once per forward, and a later backward needs again",
        releases=_TORCH_STYLE,
    ),
    Fact(
        _ENGINE,
        "DeepSpeedEngine._backward_epilogue",
        "reduces and partitions at the end of every backward",
        releases=_TORCH_STYLE,
    ),
    Fact(
        "deepspeed.runtime.utils",
        "OutputBackwardHookManager",
        "runs the prologue once per forward, not once per backward",
        releases=_TORCH_STYLE,
    ),
    Fact(
        "deepspeed.runtime.base_optimizer",
        "BackwardHookStateManager",
        "is reset by the next forward only, so a later backward must ask for it",
        releases=_HOOK_STATE,
    ),
    Fact(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag",
        "resets the hook state and moves micro_step_id",
        releases=_HOOK_STATE,
    ),
    Fact(
        _FLAT,
        "DeepSpeedZeroOptimizer.clear_backward_seen_flag",
        "resets the hook state and drops grad_accum",
        releases=_HOOK_STATE,
    ),
)

PATCH = Patch(
    name="zero3_retain",
    summary="several backwards over one ZeRO forward",
    why=(
        "Stock ZeRO-3 gathers parameters for the first backward over a forward and for no other: "
        "a second one fails with 'The size of tensor a (0) must match the size of tensor b'. On "
        "ZeRO-1/2 (0.18.3 and later) it runs and silently keeps only the last loss's gradient."
    ),
    how=(
        "Gathers and releases per backward instead of per forward, holding nothing in between, "
        "and adds the gradients of all backwards over one forward, as PyTorch does."
    ),
    remove_when=(
        "a DeepSpeed release gathers per backward and adds the gradients of several backwards "
        "over one forward; none up to 0.19.8 does"
    ),
    upstream=(
        Link("issue 7352", "https://github.com/deepspeedai/DeepSpeed/issues/7352"),
        Link("issue 3539", "https://github.com/deepspeedai/DeepSpeed/issues/3539"),
        Link("PR 8045", "https://github.com/deepspeedai/DeepSpeed/pull/8045"),
        Link("PR 8135", "https://github.com/deepspeedai/DeepSpeed/pull/8135"),
    ),
    supported=">=0.16.0,<=0.19.8",
    fixed_in=None,
    targets=_TARGETS,
    facts=_FACTS,
    options=(
        Option(
            "lost_gradients",
            default="warn",
            choices=("warn", "accumulate", "silent"),
            help=(
                "when stock overwrites a gradient of the same step with that of another forward: "
                "warn once, add them, or let it go in silence"
            ),
        ),
    ),
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
