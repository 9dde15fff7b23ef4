"""After a universal checkpoint is loaded, a script reads and sets fp32 weights, not momentum."""

from __future__ import annotations

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, upstream

_LOADS = Class("deepspeed.runtime.base_optimizer", "ZeROOptimizer")

PATCH = Patch(
    name="universal_checkpoint",
    hooks=__name__,
    summary="after a universal checkpoint, scripts read and set fp32 weights, not momentum",
    remove_when="your release is 0.19.7 or later",
    upstream=upstream("PR 8474"),
    supported=">=0.16.0,<=0.19.6",
    targets=(
        _LOADS.target("load_hp_checkpoint_state_from_checkpoint_dir", "around_load", "<=0.19.6"),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_load(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's loader flattens the states of each group's parameters."""
    from ds_patches.upstream.fragments import hp_mappings

    groups, *_ = in_order(wrapped, args, kwargs)
    weights = [mapping.hp_fragment for mapping, _ in hp_mappings(optimizer, groups)]
    result = wrapped(*args, **kwargs)
    for (mapping, flat), part in zip(hp_mappings(optimizer, groups), weights, strict=True):
        mapping.hp_fragment = part
        mapping.set_optim_state_fragment(flat, optimizer.optimizer.state.get(flat, {}))
    return result
