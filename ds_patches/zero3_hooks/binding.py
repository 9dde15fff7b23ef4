"""What zero3_hooks is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Class, Patch, upstream

_OFFLOAD = Class("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload")
_COORDINATOR = Class(
    "deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
)
_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_INIT = Class(_PARAMETERS, "Init")
_CONTEXT = Class(_PARAMETERS, "GatheredParameters")

_HOOKS = "ds_patches.zero3_hooks.hooks"
_OUTSIDE = f"{_HOOKS}:around_change"

_TARGETS = (
    _OFFLOAD.target("pre_sub_module_forward_function", _OUTSIDE),
    _OFFLOAD.target("post_sub_module_forward_function", _OUTSIDE),
    _COORDINATOR.target("reset_step", _OUTSIDE),
    _INIT.target("_all_gather", _OUTSIDE),
    _CONTEXT.target("__exit__", _OUTSIDE),
)

PATCH = Patch(
    name="zero3_hooks",
    summary="ZeRO-3 evaluates under inference_mode between training steps",
    why="Stock ZeRO-3 gathers and releases parameters in whatever mode a module is called.",
    how="Gathers and releases them outside of inference mode.",
    remove_when="a release leaves no inference tensors behind; none up to 0.19.8 does",
    upstream=upstream("PR 7665"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
)
