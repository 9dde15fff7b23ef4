"""The targets and dependencies of coalesce. Data only; `hooks` does the work."""

from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.classes import (
    COORDINATOR,
    ENGINE,
    GATHER_ONCE_DEPENDENCIES,
    GATHERED,
    TORCH_STYLE,
    ZERO3,
    ZERO12,
)

_BEGINS = "allocates the reduce buffers and counts a micro step"
_OF_HOOKS = "is called by each parameter's hook"


_TARGETS = (
    ENGINE.target("coalesce_grad_reduction", "around_coalesce", ">=0.19.1"),
    ENGINE.target("no_sync", "around_no_sync"),
    GATHERED.target("__exit__", "ds_patches.steps.gather_once:around_exit"),
)


#: In addition to those of `accumulation`, which this patch requires.
_DEPENDENCIES = (
    ENGINE.needs("step", "reads reduced gradients; wrapped at one engine, as allreduce_gradients"),
    ENGINE.needs(
        "allreduce_gradients",
        "ends a backward; wrapped at an engine whose gradients stay on its parameters",
    ),
    ENGINE.needs(
        "is_gradient_accumulation_boundary", "reads the flag that a reduction sets and restores"
    ),
    ZERO12.needs("fill_grad_accum_attribute", "moves a gradient to its fp32 sum, at stage 1"),
    ZERO12.needs("backward", "allocates the reduce buffers, as a reduction does", "<=0.16.4"),
    ZERO12.needs("backward_prologue", _BEGINS, ">=0.16.5,<=0.18.2"),
    ZERO12.needs("setup_buckets", _BEGINS, TORCH_STYLE),
    ZERO12.needs("process_gradients", _OF_HOOKS, ">=0.16.5"),
    ZERO3.needs("reduce_ready_partitions_and_remove_grads", _OF_HOOKS),
    *GATHER_ONCE_DEPENDENCIES,
    COORDINATOR.needs("_invalidate_trace", "drops a trace that an exception left incomplete"),
    COORDINATOR.needs(
        "release_backward_leftovers", "empties the stack that an exception left", ">=0.19.3"
    ),
)

PATCH = Patch(
    name="coalesce",
    summary="several backwards, one gradient reduction",
    remove_when=(
        "every release you use has coalesce_grad_reduction, and its exit reduces nothing after an "
        "exception; none up to 0.19.8 does both"
    ),
    upstream=upstream("PR 7992"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    activate="activate",
    deactivate="deactivate",
    may_unapply="may_unapply",
    requires=("accumulation",),
)
