"""What stream_safety is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Class, Dependency, Option, Patch, Target, upstream

_FLAT = Class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
_STAGE3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
_TIMER = Class("deepspeed.utils.timer", "ThroughputTimer")
_HOOKS = "ds_patches.stream_safety.hooks"

#: Each part, and the releases that lack its fix, and that it can be brought to.
LACKS = {
    "ping_pong": ">=0.17.2,<=0.18.4",
    "zero3_producer": ">=0.16.0,<=0.18.7",
    "zero3_gather": ">=0.16.0",
    "record_stream": ">=0.16.0",
    "producer_streams": ">=0.16.0,<=0.19.2",
    "buffer_reuse": ">=0.16.0",
    "bucket_ready": ">=0.16.0",
    "host_wait": ">=0.16.0",
    "micro_steps": ">=0.17.6",
}
#: Those that let something overlap, and are for whoever has measured that it pays.
FOR_SPEED = ("bucket_ready", "host_wait", "micro_steps")
SAFE = tuple(part for part in LACKS if part not in FOR_SPEED)

_TARGETS = (
    _FLAT.target("__init__", f"{_HOOKS}:around_init"),
    _FLAT.target("independent_gradient_partition_epilogue", f"{_HOOKS}:around_flat_epilogue"),
    _FLAT.target(
        "finalize_gradient_accumulation_boundary", f"{_HOOKS}:around_finalize", ">=0.19.4"
    ),
    _ENGINE.target("__init__", f"{_HOOKS}:around_engine_init", LACKS["micro_steps"]),
    Target(_FLAT.module, "IPGBucket.clear", f"{_HOOKS}:around_clear", LACKS["ping_pong"]),
    _STAGE3.target(
        "__add_grad_to_ipg_bucket", f"{_HOOKS}:around_stage3_gradient", LACKS["zero3_producer"]
    ),
    _STAGE3.target("step", f"{_HOOKS}:around_stage3_step"),
)

_TIMED = "waits for the device; wrapped at engines whose micro steps go on"
_AT_OPTIMIZERS = "; wrapped at optimizers that overlap"

_DEPENDENCIES = (
    _FLAT.needs(
        "reduce_independent_p_g_buckets_and_remove_grads",
        f"puts a gradient into its bucket{_AT_OPTIMIZERS}",
    ),
    _FLAT.needs("reduce_ipg_grads", f"reduces what is in the buckets{_AT_OPTIMIZERS}"),
    _FLAT.needs("average_tensor", f"reduces one tensor{_AT_OPTIMIZERS}"),
    _FLAT.needs("allreduce_and_copy", f"reduces what is not contiguous{_AT_OPTIMIZERS}"),
    _FLAT.needs(
        "copy_grads_in_partition", "reads a buffer on the reduction stream, inside its wrapper"
    ),
    _FLAT.needs("_release_ipg_buffers", "lets go of the buffers when all streams have met"),
    _FLAT.needs("allreduce_bucket", "allocates on the stream that it reduces on"),
    _FLAT.needs(
        "get_all_grad_tensors", "adds up micro steps where it is called", LACKS["micro_steps"]
    ),
    _TIMER.needs("start", _TIMED, LACKS["micro_steps"]),
    _TIMER.needs("stop", _TIMED, LACKS["micro_steps"]),
    _FLAT.needs(
        "_clear_previous_reduced_grads", "has nothing to clear where gradients are contiguous"
    ),
    Dependency(
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "PartitionedParameterCoordinator.__all_gather_params",
        "gathers on a stream of its own",
    ),
)

PATCH = Patch(
    name="stream_safety",
    summary="overlap_comm without races; if you say so, without needless waits",
    why="Gradients that cross streams are overwritten, read too early, or freed too early.",
    how="Whoever reads waits for whoever writes, and memory is kept until both are done.",
    remove_when="a DeepSpeed release waits for all of this by itself; none up to 0.19.8 does",
    upstream=upstream("issue 8364", "PR 7805", "PR 7898", "PR 7965", "PR 8080"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    options=(
        Option(
            "parts",
            default=SAFE,
            choices=tuple(LACKS),
            help="which fixes, each where the release lacks it; all: what is for speed, too",
        ),
    ),
    collectives=False,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
