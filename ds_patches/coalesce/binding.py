"""What coalesce is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Link, Option, Patch, Target

_ENGINE = "deepspeed.runtime.engine"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_FLAT = "deepspeed.runtime.zero.stage_1_and_2"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"

_HOOKS = "ds_patches.coalesce.hooks"

_TORCH_STYLE = ">=0.18.3"
_HOOK_STATE = ">=0.18.5"


def _engine(method: str, wrapper: str, releases: str = "", adds: bool = False) -> Target:
    qualname = f"DeepSpeedEngine.{method}"
    return Target(_ENGINE, qualname, f"{_HOOKS}:{wrapper}", releases=releases, adds=adds)


def _flat(method: str, wrapper: str, releases: str = "") -> Target:
    qualname = f"DeepSpeedZeroOptimizer.{method}"
    return Target(_FLAT, qualname, f"{_HOOKS}:{wrapper}", releases=releases)


_TARGETS = (
    _engine("coalesce_grad_reduction", "around_coalesce", adds=True),
    _engine("backward", "around_backward"),
    _engine("_backward_prologue", "around_prologue", releases=_TORCH_STYLE),
    _engine("_backward_epilogue", "around_epilogue", releases=_TORCH_STYLE),
    _engine("allreduce_gradients", "around_allreduce"),
    _engine("step", "around_step"),
    _flat("reduce_ready_partitions_and_remove_grads", "around_gradient", releases="<=0.16.4"),
    _flat("process_gradients", "around_gradient", releases=">=0.16.5"),
    Target(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.reduce_ready_partitions_and_remove_grads",
        f"{_HOOKS}:around_gradient",
    ),
    Target(
        _COORDINATOR,
        "PartitionedParameterCoordinator.__release_param",
        f"{_HOOKS}:around_release",
    ),
)

PATCH = Patch(
    name="coalesce",
    summary="several backwards, one gradient reduction",
    why=(
        "engine.coalesce_grad_reduction() came with 0.19.1. Before it, N backwards per step cost "
        "N reductions on ZeRO-2/3, or lose gradients in silence; and it reduces half a window's "
        "gradients, or hangs, when something inside raises."
    ),
    how=(
        "Leaves gradients on their parameters until the block ends, and reduces them there once. "
        "Ranks leave the block together; one that raised drops its gradients and tells the others."
    ),
    remove_when=(
        "every release you use has coalesce_grad_reduction, and its exit neither reduces after an "
        "exception nor gathers every parameter twice per backward; 0.19.8 has the first only"
    ),
    upstream=(
        Link("PR 7992", "https://github.com/deepspeedai/DeepSpeed/pull/7992"),
        Link("PR 7981", "https://github.com/deepspeedai/DeepSpeed/pull/7981"),
        Link("PR 7665", "https://github.com/deepspeedai/DeepSpeed/pull/7665"),
    ),
    supported=">=0.16.0,<=0.19.8",
    fixed_in=None,
    targets=_TARGETS,
    facts=(),
    options=(
        Option(
            "implementation",
            default="ours",
            choices=("ours", "native"),
            help="which coalesce_grad_reduction the engine gets; native from 0.19.1 on only",
        ),
        Option(
            "handshake",
            default="on",
            choices=("on", "off"),
            help="ranks meet in the store before they reduce; off: one that raises alone hangs all",
        ),
        Option(
            "flush",
            default="reduce_scatter",
            choices=("reduce_scatter", "upstream"),
            help="ZeRO-1/2: reduce-scatter where it is known to be right, or DeepSpeed's own way",
        ),
    ),
    activate=f"{_HOOKS}:activate",
)
