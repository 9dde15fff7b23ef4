"""ZeRO-3 steps with one all-gather, if parameters fit into stage3_max_live_parameters.

Not applied by default: it was measured with few settings, and it raises if the ranks use different
parameters.
"""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Refused
from ds_patches.core.patch import Patch
from ds_patches.upstream.classes import ENGINE, GATHER_ONCE_DEPENDENCIES, GATHERED, ZERO3

PATCH = Patch(
    name="zero3_gather_once",
    summary="ZeRO-3 gathers parameters once a step, where all fit into stage3_max_live_parameters",
    remove_when="a release gathers once where memory allows it; none up to 0.19.8 does",
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ENGINE.target("forward", "around_forward"),
        ENGINE.target("_take_model_step", "around_step"),
        GATHERED.target("__exit__", "ds_patches.steps.gather_once:around_exit"),
    ),
    dependencies=(
        *GATHER_ONCE_DEPENDENCIES,
        ZERO3.needs("reduce_ready_partitions_and_remove_grads", "is called for each gradient"),
    ),
    deactivate="ds_patches.steps.gather_once:close_all",  # puts DeepSpeed's module hooks back
    requires=("accumulation",),
    by_default=False,
)

apply, unapply, is_applied = api.of(__name__)

_DIFFER = (
    "ZeRO-3: the ranks have used different parameters in this step, and gradients of different "
    "parameters were added to one another. Put the step's forwards and backwards into "
    "engine.coalesce_grad_reduction(); or skip zero3_gather_once, and make z3 "
    "leaf modules of modules that not all ranks use."
)


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """All-gather all parameters before the first forward of a step, not in each module."""
    import torch

    if torch.is_grad_enabled() and engine.zero_optimization_partition_weights():
        _gather_all(engine)
    return wrapped(*args, **kwargs)


def _gather_all(engine: Any) -> None:
    """All-gather the parameters, if the engine allows it, and note why or why not. Collective."""
    from ds_patches.core import lifecycle
    from ds_patches.steps import gather_once, tracking
    from ds_patches.upstream.coverage import is_compiled

    steps = tracking.track(engine)
    # The first backward detects nested backwards, and registers external parameters.
    if steps is None or not steps.backwards_begun:
        return
    state = gather_once.state_of(engine, steps)
    compiled = is_compiled(engine) or hasattr(engine.module, "_orig_mod")
    reason = state.why_not or ("it is compiled" if compiled else None)
    when, why = ("in each forward and backward", reason) if reason else ("once", "all fit")
    lifecycle.note(PATCH.name, f"ZeRO-3 steps gather parameters {when}: {why}")
    if reason is None:
        state.open()


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise Refused before the optimizer steps if the ranks reduced different parameters."""
    from ds_patches.steps import tracking

    steps = tracking.steps_of(engine)
    if steps is not None and steps.gather_once is not None and steps.gather_once.orders_differ():
        raise Refused(_DIFFER)
    return wrapped(*args, **kwargs)
