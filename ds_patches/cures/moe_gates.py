"""DeepSpeed's MoE layer sends tokens to their likeliest experts, and small batches to any."""

from __future__ import annotations

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, Target, upstream

_GATES = "deepspeed.moe.sharded_moe"

PATCH = Patch(
    name="moe_gates",
    hooks=__name__,
    summary="DeepSpeed's MoE layer sends tokens to their likeliest experts, of small batches, too",
    remove_when="your release is 0.19.4 or later",
    upstream=upstream("PR 7986", "PR 8155"),
    supported=">=0.16.0,<=0.19.3",
    targets=(
        Target(_GATES, "topkgating", "around_several", "<=0.19.3"),
        Target(_GATES, "top1gating", "around_one", "<=0.19.3"),
    ),
    # `_capacity` is no dependency: TorchScript has compiled it, so its live code cannot be read.
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_several(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's gate of three experts or more for each token."""
    from ds_patches.upstream import moe

    logits, k, factor, least, *rest = in_order(wrapped, args, kwargs)
    if not moe.drops_tokens(rest[:1], rest[2:]):
        return wrapped(*args, **kwargs)
    if moe.compares_logits():
        logits = moe.comparable_logits(logits)
    if (takes := moe.capacity(logits, factor * k, least)) <= len(logits):
        return wrapped(logits, k, factor, least, *rest)
    return moe.pad_to_capacity(wrapped(logits, k, 0.0, len(logits), *rest), takes)


def around_one(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's gate of one expert for each token refuses fewer than `least`; Tutel's is left."""
    from ds_patches.upstream import moe

    logits, factor, least, *rest = in_order(wrapped, args, kwargs)
    takes = moe.capacity(logits, factor, least)
    drops = moe.drops_tokens(rest[2:3])
    if least > len(logits) or takes <= len(logits) or not drops or any(rest[5:]):
        return wrapped(*args, **kwargs)
    return moe.pad_to_capacity(wrapped(logits, 0.0, len(logits), *rest), takes)
