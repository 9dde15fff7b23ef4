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
_REGISTER = f"{_HOOKS}:around_register"

_TARGETS = (
    _OFFLOAD.target("pre_sub_module_forward_function", _OUTSIDE),
    _OFFLOAD.target("post_sub_module_forward_function", _OUTSIDE),
    _COORDINATOR.target("reset_step", _OUTSIDE),
    _INIT.target("_all_gather", _OUTSIDE),
    _CONTEXT.target("__exit__", _OUTSIDE),
    _OFFLOAD.target("_register_hooks_recursively", _REGISTER, "<=0.16.3"),
    _OFFLOAD.target("_register_deepspeed_module", _REGISTER, ">=0.16.4,<=0.19.1"),
    _INIT.target("_allgather_params_coalesced", f"{_HOOKS}:around_all_gather", "<=0.19.2"),
)

_DEPENDENCIES = (
    _COORDINATOR.needs("record_module", "notes steps by the number of a module", "<=0.19.1"),
    _COORDINATOR.needs("record_parameters", "looks for them by that number", "<=0.19.1"),
)

PATCH = Patch(
    name="zero3_hooks",
    summary="ZeRO-3 trains on after inference_mode, generation without hooks, mixed dtypes",
    why=(
        "Stock ZeRO-3 gathers and releases parameters in whatever mode a module is called, and "
        "knows its modules by numbers that change when their hooks are added again."
    ),
    how="Gathers and releases outside of inference mode, and keeps the numbers up to date.",
    remove_when="a release leaves no inference tensors behind; none up to 0.19.8 does",
    upstream=upstream("PR 8043", "PR 8073", "issue 8072"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
)
