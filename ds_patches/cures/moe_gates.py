"""MoE gates that keep each expert's most probable tokens, and take small batches."""

from typing import Any

from ds_patches.core import api, live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, Target, upstream

_GATES = "deepspeed.moe.sharded_moe"

PATCH = Patch(
    name="moe_gates",
    summary="experts of DeepSpeed's MoE layer keep their most probable tokens; small batches train",
    remove_when="your release is 0.19.4 or later",
    upstream=upstream("PR 7986", "PR 8155"),
    supported=">=0.16.0,<=0.19.3",
    targets=(
        Target(_GATES, "topkgating", "around_topk", "<=0.19.3"),
        Target(_GATES, "top1gating", "around_top1", "<=0.19.3"),
    ),
    # `_capacity` is no dependency: TorchScript compiles it, so the gate cannot read its code.
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_topk(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Call a gate of three or more experts per token with comparable logits, and pad its output.

    DeepSpeed drops tokens by logits, which do not compare across tokens, to 0.18.9; and raises if
    a batch has fewer tokens than an expert's capacity, to 0.19.3.
    """
    from ds_patches.upstream import moe

    logits, k, factor, min_capacity, *rest = in_order(wrapped, args, kwargs)
    # drop_tokens and drop_policy; by default the least probable tokens are dropped.
    if not all(rest[:1]) or any(policy != "probs" for policy in rest[2:]):
        return wrapped(*args, **kwargs)
    if "capacity_probs" in live.innermost(wrapped).__code__.co_varnames:  # to 0.18.9
        # Logits of the same probabilities that compare across tokens, and are positive.
        log_probs = logits.log_softmax(dim=1)
        logits = log_probs + (1.0 - log_probs.detach().nan_to_num(neginf=0.0).min())
    capacity = moe.capacity(logits, factor * k, min_capacity)
    if capacity <= len(logits):
        return wrapped(logits, k, factor, min_capacity, *rest)
    return moe.pad_to_capacity(wrapped(logits, k, 0.0, len(logits), *rest), capacity)


def around_top1(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Call a gate of one expert per token, and pad its output if tokens are too few for it.

    Fewer tokens than `min_capacity` still raise, and Tutel's gate is not changed.
    """
    from ds_patches.upstream import moe

    logits, factor, min_capacity, *rest = in_order(wrapped, args, kwargs)
    capacity = moe.capacity(logits, factor, min_capacity)
    pads = min_capacity <= len(logits) < capacity
    if not pads or not all(rest[2:3]) or any(rest[5:]):  # drop_tokens, use_tutel
        return wrapped(*args, **kwargs)
    return moe.pad_to_capacity(wrapped(logits, 0.0, len(logits), *rest), capacity)
