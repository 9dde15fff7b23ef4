"""What accumulation is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Dependency, Link, Patch, Target

_ENGINE = "deepspeed.runtime.engine"
_BASE = "deepspeed.runtime.base_optimizer"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_FLAT = "deepspeed.runtime.zero.stage_1_and_2"

_HOOKS = "ds_patches.accumulation.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"
_VECTORIZED = ">=0.16.9"
_BUCKET_CLASSES = ">=0.17.2"
_FORGETS_MICRO_STEPS = ">=0.17.6,<=0.18.2"


def _engine(method: str, wrapper: str, releases: str = "") -> Target:
    return Target(_ENGINE, f"DeepSpeedEngine.{method}", f"{_HOOKS}:{wrapper}", releases=releases)


def _stage3(method: str, wrapper: str, releases: str = "") -> Target:
    qualname = f"DeepSpeedZeroOptimizer_Stage3.{method}"
    return Target(_STAGE3, qualname, f"ds_patches.accumulation.{wrapper}", releases=releases)


def _flat(method: str, wrapper: str, releases: str = "") -> Target:
    qualname = f"DeepSpeedZeroOptimizer.{method}"
    return Target(_FLAT, qualname, f"{_HOOKS}:{wrapper}", releases=releases)


_TARGETS = (
    _engine("forward", "around_forward"),
    _engine("backward", "around_backward"),
    _engine("scale", "around_scale", releases=_TORCH_STYLE),
    _engine("_backward_prologue", "around_prologue", releases=_TORCH_STYLE),
    _engine("_backward_prologue_per_tensor", "around_per_tensor", releases=_TORCH_STYLE),
    _engine("_backward_post_hook", "around_post_hook", releases=_HOOK_STATE),
    _engine("zero_grad", "around_zero_grad"),
    _engine("_take_model_step", "around_model_step"),
    Target(
        _BASE,
        "BackwardHookStateManager.enter_backward",
        f"{_HOOKS}:around_enter_backward",
        releases=_HOOK_STATE,
    ),
    _stage3("partition_grads", "partition_sum:around_partition_grads"),
    _stage3("get_fp32_grad_for_param", "by_hand:around_get_grad"),
    _stage3("get_local_fp32_grad_for_param", "by_hand:around_get_grad"),
    _stage3("set_fp32_grad_for_param", "by_hand:around_set_grad"),
    _stage3("set_local_grad_for_param", "by_hand:around_set_grad"),
    _stage3(
        "update_fp32_grad_for_param_vectorized", "by_hand:around_set_grad", releases=_VECTORIZED
    ),
    _stage3("zero_grad", "hooks:around_zero_grad"),
    _flat("independent_gradient_partition_epilogue", "around_flat_epilogue"),
    _flat("zero_grad", "around_zero_grad"),
    Target(
        _FLAT,
        "split_half_float_double",
        f"{_HOOKS}:around_split",
        releases="<=0.19.7",
    ),
    Target(
        "deepspeed.utils.tensor_fragment",
        "tensor_fragment.get_lp_grad_fragment",
        "ds_patches.accumulation.by_hand:around_fragment",
    ),
    _flat("get_all_grad_tensors", "around_all_grad_tensors", releases=_FORGETS_MICRO_STEPS),
)

_DEPENDENCIES = (
    Dependency(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue",
        "hands the partition buffers to the step, whether written or not",
    ),
    Dependency(
        _FLAT,
        "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu",
        "with CPU offload, adds to host buffers that no step clears",
    ),
    Dependency(
        _FLAT,
        "DeepSpeedZeroOptimizer._release_ipg_buffers",
        "gives the reduce buffers back after a backward that raised",
    ),
    Dependency(
        _FLAT,
        "IPGBucket",
        "holds the gradients that a backward that raised left unreduced",
        releases=_BUCKET_CLASSES,
    ),
    Dependency(
        _STAGE3,
        "IPGBucketZ3",
        "holds the gradients that a backward that raised left unreduced",
        releases=_BUCKET_CLASSES,
    ),
    Dependency(
        "deepspeed.runtime.bf16_optimizer",
        "BF16_Optimizer.update_hp_grads",
        "adds each backward's bf16 gradients to the fp32 ones",
    ),
    Dependency(
        _FLAT,
        "DeepSpeedZeroOptimizer.copy_grads_in_partition",
        "with CPU offload, copies a micro step to the host; wrapped at such optimizers alone",
    ),
    Dependency(
        _FLAT,
        "DeepSpeedZeroOptimizer.reduce_gradients",
        "at stage 1 with overlap_comm, leaves out what the last backward did not reach",
    ),
    Dependency(
        _ENGINE,
        "DeepSpeedEngine._backward_epilogue",
        "reduces and partitions at the end of every backward",
        releases=_TORCH_STYLE,
    ),
    Dependency(
        "deepspeed.runtime.utils",
        "OutputBackwardHookManager",
        "runs the prologue once per forward, not once per backward",
        releases=_TORCH_STYLE,
    ),
    Dependency(
        "deepspeed.runtime.base_optimizer",
        "BackwardHookStateManager",
        "is reset by the next forward only, so a later backward must ask for it",
        releases=_HOOK_STATE,
    ),
    Dependency(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag",
        "resets the hook state and moves micro_step_id",
        releases=_HOOK_STATE,
    ),
    Dependency(
        _FLAT,
        "DeepSpeedZeroOptimizer.clear_backward_seen_flag",
        "resets the hook state and drops grad_accum",
        releases=_HOOK_STATE,
    ),
)

PATCH = Patch(
    name="accumulation",
    summary="gradients of a step add up, as in PyTorch",
    why=(
        "Between two steps every backward adds to the gradient in PyTorch. DeepSpeed keeps the "
        "last of several backwards, loses micro steps, or steps with an older gradient, in "
        "silence; which, depends on the release, the stage and the settings."
    ),
    how=(
        "Knows which backwards belong to a step, and lets each reduction add to what the step has "
        "reduced; what a step has not reached is zero."
    ),
    remove_when="a release adds up what PyTorch adds up; none up to 0.19.8 does",
    upstream=(
        Link("PR 7665", "https://github.com/deepspeedai/DeepSpeed/pull/7665"),
        Link("PR 7967", "https://github.com/deepspeedai/DeepSpeed/pull/7967"),
        Link("PR 7981", "https://github.com/deepspeedai/DeepSpeed/pull/7981"),
        Link("PR 7985", "https://github.com/deepspeedai/DeepSpeed/pull/7985"),
        Link("issue 7718", "https://github.com/deepspeedai/DeepSpeed/issues/7718"),
        Link("issue 7724", "https://github.com/deepspeedai/DeepSpeed/issues/7724"),
    ),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
