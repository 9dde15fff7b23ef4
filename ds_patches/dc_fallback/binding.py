"""The targets and dependencies of dc_fallback. Data only; `hooks` does the work."""

from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.classes import ENGINE, GATHERED, OFFLOAD, ZERO3

_COMPILE = "deepspeed.compile"


_TARGETS = (
    ENGINE.target("compile", "around_compile"),
    GATHERED.target("__init__", "around_gathered"),
    GATHERED.target("__enter__", "around_enter"),
    GATHERED.target("__exit__", "around_exit"),
)


def _native(name: str, why: str) -> Dependency:
    return Dependency(f"{_COMPILE}.z3_eager_fallback", name, why, ">=0.19.3")


_OF_COMPILED = "; wrapped at engines that DeepCompile has compiled"

_DEPENDENCIES = (
    ENGINE.needs("forward", f"calls the module or its compiled form{_OF_COMPILED}"),
    ENGINE.needs("_backward_prologue", f"begins every backward{_OF_COMPILED}"),
    ENGINE.needs("_backward_epilogue", f"ends every backward{_OF_COMPILED}"),
    ENGINE.needs("zero_grad", f"asks for zero gradients{_OF_COMPILED}"),
    ZERO3.needs("zero_grad", f"the same{_OF_COMPILED}"),
    ZERO3.needs("step", f"steps with the partitions{_OF_COMPILED}"),
    Dependency(
        f"{_COMPILE}.init_z3",
        "init_z3",
        "removes all hooks that gather or reduce; makes the step read the gradient partitions",
    ),
    Dependency(OFFLOAD.module, "ZeROOrderedDict", "holds a module's parameters; subclassed"),
    _native(
        "deepcompile_z3_forward_context",
        "does nothing for an engine without a fallback of DeepSpeed's own",
    ),
    _native(
        "DeepCompileZ3EagerFallback.release_gathered_params",
        "releases the parameters that DeepSpeed's own fallback has gathered",
    ),
    Dependency(
        f"{_COMPILE}.util",
        "deepcompile_backward_prologue",
        "tells the graphs if a backward is at the boundary; the patch may tell them otherwise",
    ),
    Dependency(
        f"{_COMPILE}.backend",
        "make_backend",
        "waits for a backward of each graph whose frame had one; the patch resets that",
    ),
    Dependency(f"{_COMPILE}.graph_param", "DSGraphParamManager", "holds the parameters of a graph"),
    ZERO3.needs("has_overflow", "reads the flat partitions"),
    ZERO3.needs(
        "_prepare_fp32_grad_for_sub_group",
        "steps with the partitions that averaged_gradients points at",
    ),
    Dependency(
        GATHERED.module, "free_param", "frees a gathered tensor when its last reference goes"
    ),
)

PATCH = Patch(
    name="dc_fallback",
    summary="DeepCompile ZeRO-3 with frames that Dynamo skips",
    remove_when=(
        "a DeepSpeed release trains parameters that DeepCompile's graphs do not hold; none up to "
        "0.19.8 does"
    ),
    upstream=upstream("issue 7942", "PR 8059", "PR 8157"),
    supported=">=0.19.2,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate="activate",
    deactivate="deactivate",
)
