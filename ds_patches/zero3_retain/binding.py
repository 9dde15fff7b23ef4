"""What zero3_retain is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Dependency, Link, Patch, Target

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"

_HOOKS = "ds_patches.zero3_retain.hooks"


def _register(method: str, releases: str) -> Target:
    return Target(
        _OFFLOAD,
        f"DeepSpeedZeRoOffload.{method}",
        f"{_HOOKS}:around_register",
        releases=releases,
    )


_TARGETS = (
    _register("_register_hooks_recursively", "<=0.16.3"),
    _register("_register_deepspeed_module", ">=0.16.4"),
)

_DEPENDENCIES = (
    Dependency(
        _OFFLOAD,
        "DeepSpeedZeRoOffload.pre_sub_module_backward_function",
        "gathers a module before its backward and records the fetch in the trace",
    ),
    Dependency(
        _OFFLOAD,
        "DeepSpeedZeRoOffload.post_sub_module_backward_function",
        "releases a module after its backward",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator.fetch_sub_module",
        "reads the prefetch queue that a repeated backward rewinds",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        "reads the prefetch queue that a repeated backward rewinds",
        releases=">=0.18.6",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator.reset_step",
        "fills the prefetch queue from the trace, as the rewind does",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_sub_module",
        "from 0.19.3 insists on an active backward fetch",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_and_reset_all",
        "partitions everything again after a backward that raised",
    ),
    Dependency(
        _COORDINATOR,
        "PartitionedParameterCoordinator.__release_param",
        "partitions one parameter and keeps the count of gathered elements",
    ),
)

PATCH = Patch(
    name="zero3_retain",
    summary="several backwards over one ZeRO-3 forward",
    why=(
        "Stock ZeRO-3 gathers parameters for the first backward over a forward and for no other: "
        "a second one fails with 'The size of tensor a (0) must match the size of tensor b'."
    ),
    how=("Gathers and releases per backward instead of per forward, holding nothing in between."),
    remove_when="a DeepSpeed release gathers per backward; none up to 0.19.8 does",
    upstream=(
        Link("issue 7352", "https://github.com/deepspeedai/DeepSpeed/issues/7352"),
        Link("issue 3539", "https://github.com/deepspeedai/DeepSpeed/issues/3539"),
        Link("PR 8045", "https://github.com/deepspeedai/DeepSpeed/pull/8045"),
        Link("PR 8135", "https://github.com/deepspeedai/DeepSpeed/pull/8135"),
    ),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
    requires=("accumulation",),
)
