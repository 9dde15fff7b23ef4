"""Access to fp32 weights, not momentum, after a universal checkpoint was loaded."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, upstream

_OPTIMIZER = Class("deepspeed.runtime.base_optimizer", "ZeROOptimizer")

PATCH = Patch(
    name="universal_checkpoint",
    summary="after a universal checkpoint, scripts read and set fp32 weights, not momentum",
    remove_when="your release is 0.19.7 or later",
    upstream=upstream("PR 8474"),
    supported=">=0.16.0,<=0.19.6",
    targets=(
        _OPTIMIZER.target(
            "load_hp_checkpoint_state_from_checkpoint_dir", "around_load", "<=0.19.6"
        ),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_load(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Restore parameters' links to fp32 weights and states, which the load sets wrong."""
    from ds_patches.upstream.fragments import hp_mappings

    groups, *_ = in_order(wrapped, args, kwargs)
    fragments = [mapping.hp_fragment for mapping, _ in hp_mappings(optimizer, groups)]
    result = wrapped(*args, **kwargs)
    for (mapping, flat), fragment in zip(hp_mappings(optimizer, groups), fragments, strict=True):
        mapping.hp_fragment = fragment
        mapping.set_optim_state_fragment(flat, optimizer.optimizer.state.get(flat, {}))
    return result
