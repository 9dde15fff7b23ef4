"""What dc_fallback is, and where it touches DeepSpeed. Data only; the work is in `hooks`."""

from __future__ import annotations

from ds_patches.core.patch import Dependency, Link, Patch, Target

_ENGINE = "deepspeed.runtime.engine"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COMPILE = "deepspeed.compile"

_HOOKS = "ds_patches.dc_fallback.hooks"

_OWN_FALLBACK = ">=0.19.3"


def _engine(method: str, wrapper: str) -> Target:
    return Target(_ENGINE, f"DeepSpeedEngine.{method}", f"{_HOOKS}:{wrapper}")


def _context(method: str, wrapper: str) -> Target:
    return Target(_PARAMETERS, f"GatheredParameters.{method}", f"{_HOOKS}:{wrapper}")


_TARGETS = (
    _engine("compile", "around_compile"),
    _engine("forward", "around_forward"),
    _engine("_backward_prologue", "around_prologue"),
    _engine("zero_grad", "around_zero_grad"),
    Target(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.zero_grad", f"{_HOOKS}:around_zero_grad"),
    Target(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.step", f"{_HOOKS}:around_step"),
    _context("__init__", "around_gathered"),
    _context("__enter__", "around_enter"),
    _context("__exit__", "around_exit"),
)

_DEPENDENCIES = (
    Dependency(
        _ENGINE,
        "DeepSpeedEngine._backward_epilogue",
        "ends every backward; wrapped at engines that DeepCompile has compiled",
    ),
    Dependency(
        f"{_COMPILE}.init_z3",
        "init_z3",
        "removes all hooks that gather or reduce; has the step read the gradient partitions",
    ),
    Dependency(_OFFLOAD, "ZeROOrderedDict", "holds a module's parameters; ours is one"),
    Dependency(
        f"{_COMPILE}.z3_eager_fallback",
        "deepcompile_z3_forward_context",
        "does nothing for an engine without a fallback of DeepSpeed's own",
        releases=_OWN_FALLBACK,
    ),
    Dependency(
        f"{_COMPILE}.z3_eager_fallback",
        "DeepCompileZ3EagerFallback.release_gathered_params",
        "lets go of all that DeepSpeed's own fallback has gathered",
        releases=_OWN_FALLBACK,
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
    Dependency(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.has_overflow", "reads the flat partitions"),
    Dependency(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group",
        "steps with the partitions that averaged_gradients points at",
    ),
    Dependency(_PARAMETERS, "free_param", "leaves what was gathered to whoever still refers to it"),
)

PATCH = Patch(
    name="dc_fallback",
    summary="DeepCompile ZeRO-3 with frames that Dynamo skips",
    why=(
        "Code that Dynamo cannot compile runs eagerly, and DeepCompile has removed all that "
        "gathers and reduces there. Up to 0.19.2 it crashes ('weight' must be 2-D); from 0.19.3 "
        "its parameters are gathered and, without a word, not trained, and a graph break in a "
        "loop still crashes."
    ),
    how=(
        "Eager code sees a gathered tensor in place of a parameter, once per module call. Autograd "
        "keeps a note of it, gathers it again in the backward, and hands its gradient to a "
        "reduction into the partitions that the optimizer steps with."
    ),
    remove_when=(
        "a DeepSpeed release trains parameters that DeepCompile's graphs do not hold; none up to "
        "0.19.8 does"
    ),
    upstream=(
        Link("issue 7942", "https://github.com/deepspeedai/DeepSpeed/issues/7942"),
        Link("PR 8059", "https://github.com/deepspeedai/DeepSpeed/pull/8059"),
        Link("PR 8157", "https://github.com/deepspeedai/DeepSpeed/pull/8157"),
    ),
    supported=">=0.19.2,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate=f"{_HOOKS}:activate",
    deactivate=f"{_HOOKS}:deactivate",
)
