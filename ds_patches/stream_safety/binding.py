"""The targets and dependencies of stream_safety. Data only; `hooks` does the work."""

from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.classes import COORDINATOR, ZERO3, ZERO12

_AT_OPTIMIZERS = "; wrapped at optimizers that overlap"

PATCH = Patch(
    name="stream_safety",
    summary="overlap_comm without races",
    remove_when="a DeepSpeed release has all of these waits; none up to 0.19.8 does",
    upstream=upstream("issue 8364", "PR 7805", "PR 7898", "PR 7965", "PR 8080"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ZERO12.target("__init__", "around_use"),
        ZERO12.target("step", "around_use"),
        ZERO3.target("__add_grad_to_ipg_bucket", "around_stage3_gradient", "<=0.18.7"),
        ZERO3.target("step", "around_stage3_step"),
    ),
    dependencies=(
        ZERO12.needs(
            "reduce_independent_p_g_buckets_and_remove_grads",
            f"puts a gradient into its bucket{_AT_OPTIMIZERS}",
        ),
        ZERO12.needs(
            "independent_gradient_partition_epilogue",
            f"waits for all reductions{_AT_OPTIMIZERS}",
        ),
        ZERO12.needs("average_tensor", f"reduces one tensor{_AT_OPTIMIZERS}"),
        ZERO12.needs("allreduce_and_copy", f"reduces non-contiguous gradients{_AT_OPTIMIZERS}"),
        ZERO12.needs(
            "copy_grads_in_partition", "reads a bucket on the reduction stream, inside its wrapper"
        ),
        ZERO12.needs("_release_ipg_buffers", "frees the buffers after all streams have waited"),
        ZERO12.needs("allreduce_bucket", "allocates on the reduction stream"),
        Dependency(
            ZERO12.module,
            "IPGBucket.clear",
            f"empties a bucket, and starts it in its first buffer{_AT_OPTIMIZERS}",
            ">=0.17.2,<=0.18.4",
        ),
        COORDINATOR.needs("__all_gather_params", "gathers on its own stream"),
    ),
    collectives=False,
    activate="activate",
    deactivate="deactivate",
)
