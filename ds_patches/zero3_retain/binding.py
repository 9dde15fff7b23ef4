"""The targets and dependencies of zero3_retain. Data only; `hooks` does the work."""

from ds_patches.core.patch import Patch, Target, upstream
from ds_patches.upstream.classes import COORDINATOR, GATHERED, OFFLOAD

_TARGETS = (
    OFFLOAD.target("_register_hooks_recursively", "around_register", "<=0.16.3"),
    OFFLOAD.target("_register_deepspeed_module", "around_register", ">=0.16.4"),
    OFFLOAD.target("post_sub_module_forward_function", "around_forward_release", "<=0.19.2"),
    Target(COORDINATOR.module, "update_recompute_parameters", "around_attribution", ">=0.19.3"),
    GATHERED.target("__enter__", "around_enter"),
    GATHERED.target("__exit__", "around_exit"),
)


_REWOUND = "reads the prefetch queue that a repeated backward rewinds"

#: In addition to those of `accumulation`, which this patch requires.
_DEPENDENCIES = (
    OFFLOAD.needs("post_sub_module_backward_function", "releases a module after its backward"),
    COORDINATOR.needs("fetch_sub_module", _REWOUND),
    COORDINATOR.needs("_fetch_sub_module_impl", _REWOUND, ">=0.18.6"),
    COORDINATOR.needs("reset_step", "fills the prefetch queue from the trace, as the rewind does"),
    COORDINATOR.needs("release_sub_module", "from 0.19.3 requires an active backward fetch"),
    COORDINATOR.needs(
        "release_and_reset_all", "partitions all parameters after a backward that raised"
    ),
    COORDINATOR.needs(
        "__release_param", "partitions one parameter and keeps the count of gathered elements"
    ),
)

PATCH = Patch(
    name="zero3_retain",
    summary="several backwards over one ZeRO-3 forward",
    remove_when="a DeepSpeed release gathers per backward; none up to 0.19.8 does",
    upstream=upstream(
        "issue 7352", "issue 3539", "PR 8045", "PR 8135", "PR 8148", "PR 8144", "issue 4595"
    ),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate="activate",
    deactivate="deactivate",
    requires=("accumulation",),
)
