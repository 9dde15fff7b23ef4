"""What accumulation is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Class, Dependency, Patch, Target, upstream

_ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
_STATE = Class("deepspeed.runtime.base_optimizer", "BackwardHookStateManager")
_STAGE3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_FLAT = Class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")

_UNFUSED = Class("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
_FRAGMENT = Class("deepspeed.utils.tensor_fragment", "tensor_fragment")

_HOOKS = "ds_patches.accumulation.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"
_VECTORIZED = ">=0.16.9"
_BUCKET_CLASSES = ">=0.17.2"
_FORGETS_MICRO_STEPS = ">=0.17.6,<=0.18.2"
_UNFUSED_BF16 = ">=0.17.6,<=0.18.5"
_COUNTS = ">=0.18.3,<=0.18.6"


_TARGETS = (
    _ENGINE.target("forward", f"{_HOOKS}:around_forward"),
    _ENGINE.target("backward", f"{_HOOKS}:around_backward"),
    _ENGINE.target("scale", f"{_HOOKS}:around_scale", _TORCH_STYLE),
    _ENGINE.target("_backward_prologue", f"{_HOOKS}:around_prologue", _TORCH_STYLE),
    _ENGINE.target("_backward_prologue_per_tensor", f"{_HOOKS}:around_per_tensor", _TORCH_STYLE),
    _ENGINE.target("_backward_post_hook", f"{_HOOKS}:around_post_hook", _HOOK_STATE),
    _ENGINE.target("zero_grad", f"{_HOOKS}:around_zero_grad"),
    _ENGINE.target("_take_model_step", f"{_HOOKS}:around_model_step"),
    _STATE.target("enter_backward", f"{_HOOKS}:around_enter_backward", _HOOK_STATE),
    _STAGE3.target(
        "partition_grads", "ds_patches.accumulation.partition_sum:around_partition_grads"
    ),
    _STAGE3.target("get_fp32_grad_for_param", f"{_HOOKS}:around_get_grad"),
    _STAGE3.target("get_local_fp32_grad_for_param", f"{_HOOKS}:around_get_grad"),
    _STAGE3.target("set_fp32_grad_for_param", f"{_HOOKS}:around_set_grad"),
    _STAGE3.target("set_local_grad_for_param", f"{_HOOKS}:around_set_grad"),
    _STAGE3.target(
        "update_fp32_grad_for_param_vectorized", f"{_HOOKS}:around_set_grad", _VECTORIZED
    ),
    _STAGE3.target("zero_grad", f"{_HOOKS}:around_zero_grad"),
    _FLAT.target("independent_gradient_partition_epilogue", f"{_HOOKS}:around_flat_epilogue"),
    _FLAT.target("zero_grad", f"{_HOOKS}:around_zero_grad"),
    Target(_FLAT.module, "split_half_float_double", f"{_HOOKS}:around_split", "<=0.19.7"),
    _FLAT.target("get_all_grad_tensors", f"{_HOOKS}:around_all_grad_tensors", _FORGETS_MICRO_STEPS),
    Target(_FLAT.module, "count_used_parameters_in_backward", f"{_HOOKS}:around_count", _COUNTS),
    Target(_STAGE3.module, "count_used_parameters_in_backward", f"{_HOOKS}:around_count", _COUNTS),
    _UNFUSED.target("backward", "ds_patches.accumulation.unsharded:around_backward", _UNFUSED_BF16),
    _UNFUSED.target("step", "ds_patches.accumulation.unsharded:around_step", _UNFUSED_BF16),
)


_UNREDUCED = "holds the gradients that a backward that raised left unreduced"

_DEPENDENCIES = (
    _STAGE3.needs(
        "independent_gradient_partition_epilogue",
        "hands the partition buffers to the step, whether written or not",
    ),
    _FLAT.needs(
        "async_accumulate_grad_in_cpu_via_gpu",
        "with CPU offload, adds to host buffers that no step clears",
    ),
    _FRAGMENT.needs(
        "get_lp_grad_fragment",
        "with CPU offload, takes what a script reads or gives from the optimizer's list",
    ),
    _FLAT.needs(
        "_release_ipg_buffers", "gives the reduce buffers back after a backward that raised"
    ),
    Dependency(_FLAT.module, "IPGBucket", _UNREDUCED, _BUCKET_CLASSES),
    Dependency(_STAGE3.module, "IPGBucketZ3", _UNREDUCED, _BUCKET_CLASSES),
    Dependency(
        "deepspeed.runtime.bf16_optimizer",
        "BF16_Optimizer.update_hp_grads",
        "adds each backward's bf16 gradients to the fp32 ones",
    ),
    _FLAT.needs("reduce_ipg_grads", "reduces what is in the buckets"),
    _FLAT.needs("reduce_ready_partitions_and_remove_grads", "takes each gradient that comes"),
    _FLAT.needs(
        "reduce_independent_p_g_buckets_and_remove_grads",
        "puts a gradient into a bucket, and reduces one that is full",
    ),
    _FLAT.needs(
        "copy_grads_in_partition",
        "with CPU offload, copies a micro step to the host; wrapped at such optimizers alone",
    ),
    _FLAT.needs(
        "reduce_gradients",
        "at stage 1 with overlap_comm, leaves out what the last backward did not reach",
    ),
    _ENGINE.needs(
        "_backward_epilogue", "reduces and partitions at the end of every backward", _TORCH_STYLE
    ),
    Dependency(
        "deepspeed.runtime.utils",
        "OutputBackwardHookManager",
        "runs the prologue once per forward, not once per backward",
        _TORCH_STYLE,
    ),
    Dependency(
        _STATE.module,
        _STATE.name,
        "is reset by the next forward only, so a later backward must ask for it",
        _HOOK_STATE,
    ),
    _STAGE3.needs(
        "clear_backward_seen_flag", "resets the hook state and moves micro_step_id", _HOOK_STATE
    ),
    _FLAT.needs(
        "clear_backward_seen_flag", "resets the hook state and drops grad_accum", _HOOK_STATE
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
    how="Each reduction adds to what its step has reduced; what a step has not reached is zero.",
    remove_when="a release adds up what PyTorch adds up; none up to 0.19.8 does",
    upstream=upstream("PR 7665", "PR 7967", "PR 7981", "PR 7985", "issue 7718", "issue 7724"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
