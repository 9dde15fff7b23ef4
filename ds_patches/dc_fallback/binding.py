"""What dc_fallback is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Class, Dependency, Patch, upstream

_ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
_STAGE3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_CONTEXT = Class("deepspeed.runtime.zero.partition_parameters", "GatheredParameters")
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COMPILE = "deepspeed.compile"

_HOOKS = "ds_patches.dc_fallback.hooks"


_TARGETS = (
    _ENGINE.target("compile", f"{_HOOKS}:around_compile"),
    _ENGINE.target("forward", f"{_HOOKS}:around_forward"),
    _ENGINE.target("_backward_prologue", f"{_HOOKS}:around_prologue"),
    _ENGINE.target("zero_grad", f"{_HOOKS}:around_zero_grad"),
    _STAGE3.target("zero_grad", f"{_HOOKS}:around_zero_grad"),
    _STAGE3.target("step", f"{_HOOKS}:around_step"),
    _CONTEXT.target("__init__", f"{_HOOKS}:around_gathered"),
    _CONTEXT.target("__enter__", f"{_HOOKS}:around_enter"),
    _CONTEXT.target("__exit__", f"{_HOOKS}:around_exit"),
)


def _native(name: str, why: str) -> Dependency:
    return Dependency(f"{_COMPILE}.z3_eager_fallback", name, why, ">=0.19.3")


_DEPENDENCIES = (
    _ENGINE.needs(
        "_backward_epilogue",
        "ends every backward; wrapped at engines that DeepCompile has compiled",
    ),
    Dependency(
        f"{_COMPILE}.init_z3",
        "init_z3",
        "removes all hooks that gather or reduce; has the step read the gradient partitions",
    ),
    Dependency(_OFFLOAD, "ZeROOrderedDict", "holds a module's parameters; ours is one"),
    _native(
        "deepcompile_z3_forward_context",
        "does nothing for an engine without a fallback of DeepSpeed's own",
    ),
    _native(
        "DeepCompileZ3EagerFallback.release_gathered_params",
        "lets go of all that DeepSpeed's own fallback has gathered",
    ),
    Dependency(
        f"{_COMPILE}.util",
        "deepcompile_backward_prologue",
        "tells the graphs whether a backward is at the boundary; here they are told again",
    ),
    Dependency(
        f"{_COMPILE}.backend",
        "make_backend",
        "waits for a backward of each graph whose frame was partitioned once; told to forget that",
    ),
    Dependency(f"{_COMPILE}.graph_param", "DSGraphParamManager", "knows the parameters of a graph"),
    _STAGE3.needs("has_overflow", "reads the flat partitions"),
    _STAGE3.needs(
        "_prepare_fp32_grad_for_sub_group",
        "steps with the partitions that averaged_gradients points at",
    ),
    Dependency(
        _CONTEXT.module, "free_param", "leaves what was gathered to whoever still refers to it"
    ),
)

PATCH = Patch(
    name="dc_fallback",
    summary="DeepCompile ZeRO-3 with frames that Dynamo skips",
    why="Code that Dynamo cannot compile runs eagerly, where nothing gathers or reduces any more.",
    how="Eager code sees a gathered tensor in place of a parameter, and its gradient is reduced.",
    remove_when=(
        "a DeepSpeed release trains parameters that DeepCompile's graphs do not hold; none up to "
        "0.19.8 does"
    ),
    upstream=upstream("issue 7942", "PR 8059", "PR 8157"),
    supported=">=0.19.2,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
