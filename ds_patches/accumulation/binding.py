"""Targets and dependencies of accumulation. Data only; the code is in `hooks`."""

from ds_patches.core.patch import Dependency, Patch, Target, upstream
from ds_patches.upstream.classes import (
    BF16,
    COUNTING,
    ENGINE,
    HOOK_STATE,
    OFFLOAD,
    TORCH_STYLE,
    ZERO3,
    ZERO12,
)

_COUNTS = ">=0.18.3,<=0.18.6"
_UNREDUCED = "holds the unreduced gradients of a backward that raised"

_TARGETS = (
    ENGINE.target("forward", "around_forward"),
    ENGINE.target("backward", "around_backward"),
    ENGINE.target("scale", "around_scale", TORCH_STYLE),
    ENGINE.target("_backward_prologue", "around_prologue", TORCH_STYLE),
    ENGINE.target("_backward_prologue_per_tensor", "around_per_tensor", TORCH_STYLE),
    ENGINE.target("_backward_post_hook", "around_post_hook", TORCH_STYLE),
    ENGINE.target("zero_grad", "around_zero_grad"),
    ENGINE.target("set_train_batch_size", "around_batch_size"),
    ENGINE.target("_take_model_step", "around_model_step"),
    HOOK_STATE.target("enter_backward", "around_enter_backward", COUNTING),
    ZERO3.target("partition_grads", "ds_patches.steps.zero3_sum:around_partition_grads"),
    ZERO3.target("get_fp32_grad_for_param", "around_get_grad"),
    ZERO3.target("get_local_fp32_grad_for_param", "around_get_grad"),
    ZERO3.target("set_fp32_grad_for_param", "around_set_grad"),
    ZERO3.target("set_local_grad_for_param", "around_set_grad"),
    ZERO3.target("update_fp32_grad_for_param_vectorized", "around_set_grad", ">=0.16.9"),
    ZERO3.target("zero_grad", "around_zero_grad"),
    ZERO12.target("zero_grad", "around_zero_grad"),
    Target(ZERO12.module, "split_half_float_double", "around_split", "<=0.19.7"),
    ZERO12.target("get_all_grad_tensors", "around_all_grad_tensors", ">=0.17.6,<=0.18.2"),
    Target(ZERO12.module, "count_used_parameters_in_backward", "around_count", _COUNTS),
    Target(ZERO3.module, "count_used_parameters_in_backward", "around_count", _COUNTS),
)

_DEPENDENCIES = (
    ZERO12.needs(
        "independent_gradient_partition_epilogue",
        "leaves the averaged gradients to the step; wrapped at each optimizer",
    ),
    ZERO3.needs(
        "independent_gradient_partition_epilogue",
        "gives the step all gradient partitions, also those that no backward has written",
    ),
    ZERO12.needs(
        "async_accumulate_grad_in_cpu_via_gpu",
        "with CPU offload, adds to host buffers that no step clears",
    ),
    Dependency(
        "deepspeed.utils.tensor_fragment",
        "tensor_fragment.get_lp_grad_fragment",
        "with CPU offload, indexes the optimizer's list when a script reads or sets a gradient",
    ),
    ZERO12.needs("_release_ipg_buffers", "frees the reduce buffers after a backward that raised"),
    Dependency(
        "deepspeed.runtime.utils",
        "count_used_parameters_in_backward",
        "is imported by both optimizers under this name",
        _COUNTS,
    ),
    Dependency(ZERO12.module, "IPGBucket", _UNREDUCED, ">=0.17.2"),
    Dependency(ZERO3.module, "IPGBucketZ3", _UNREDUCED, ">=0.17.2"),
    BF16.needs("update_hp_grads", "adds each backward's bf16 gradients to the fp32 ones"),
    ZERO12.needs("reduce_ipg_grads", "reduces the buckets"),
    ZERO12.needs("average_tensor", "averages a bucket, which is divided before in place"),
    ZERO3.needs("__reduce_and_partition_ipg_grads", "reduces a bucket; wrapped at each optimizer"),
    ZERO3.needs(
        "__add_grad_to_ipg_bucket", "puts a gradient into a bucket, also one that was just reduced"
    ),
    OFFLOAD.needs(
        "pre_sub_module_backward_function",
        "begins a module's backward; wrapped where devices have streams",
    ),
    ZERO12.needs(
        "reduce_ready_partitions_and_remove_grads", "is called for each gradient that arrives"
    ),
    ZERO12.needs(
        "reduce_independent_p_g_buckets_and_remove_grads",
        "puts a gradient into a bucket, and reduces one that is full",
    ),
    ZERO12.needs(
        "copy_grads_in_partition",
        "with CPU offload, copies a micro step to the host; wrapped at such optimizers only",
    ),
    ZERO12.needs(
        "reduce_gradients",
        "at stage 1 with overlap_comm, skips parameters that the last backward did not reach",
    ),
    ENGINE.needs(
        "_backward_epilogue", "reduces and partitions at the end of every backward", TORCH_STYLE
    ),
    Dependency(
        "deepspeed.runtime.utils",
        "OutputBackwardHookManager",
        "runs the prologue once per forward, not once per backward",
        TORCH_STYLE,
    ),
    Dependency(
        HOOK_STATE.module,
        HOOK_STATE.name,
        "is reset by the next forward only, so another backward has to reset it",
        COUNTING,
    ),
    ZERO3.needs(
        "clear_backward_seen_flag", "resets the hook state and moves micro_step_id", COUNTING
    ),
    ZERO12.needs(
        "clear_backward_seen_flag", "resets the hook state and drops grad_accum", COUNTING
    ),
)

PATCH = Patch(
    name="accumulation",
    summary="gradients of a step add up, as in PyTorch",
    remove_when="a release adds up the gradients that PyTorch adds up; none up to 0.19.8 does",
    upstream=upstream("PR 7665", "PR 7967", "PR 7981", "PR 7985", "issue 7718", "issue 7724"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate="activate",
    deactivate="deactivate",
)
