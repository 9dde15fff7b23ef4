"""DeepSpeed's MoE layer sends tokens to their likeliest experts, and small batches to any.

Use
    Apply it, and write nothing. ``deepspeed.moe.layer.MoE`` with ``k`` of 3 or more and
    ``drop_tokens`` then keeps, for each expert, the tokens that most probably are its own; and a
    batch of fewer tokens than an expert may take trains.

Risks
    A run that resumes goes on with other experts than it began with.

Cost
    A ``log_softmax`` of the gate's logits in each forward, to 0.18.9 and with such a ``k``.

Why
    To 0.18.9 a gate of three experts or more compares logits where an expert has more tokens than
    it takes. Of tokens that did not choose it they count as 0, which is more than a negative one,
    and those of different tokens are not to be compared. To 0.19.3 gates of one expert, and of
    three or more, choose as many tokens as an expert takes, also where there are fewer.

How
    The gate is given logarithms of probabilities, raised so that all are positive. Where an expert
    takes more tokens than there are, it is let take all, and what the gate returns is padded.

Upstream
    Pull requests 7986 (0.19.0) and 8155 (0.19.4).
"""

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
    if not moe.drops(rest[:1], rest[2:]):
        return wrapped(*args, **kwargs)
    if moe.compares_logits():
        logits = moe.comparable(logits)
    if (takes := moe.capacity(logits, factor * k, least)) <= len(logits):
        return wrapped(logits, k, factor, least, *rest)
    return moe.padded(wrapped(logits, k, 0.0, len(logits), *rest), takes)


def around_one(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's gate of one expert for each token refuses fewer than `least`; Tutel's is left."""
    from ds_patches.upstream import moe

    logits, factor, least, *rest = in_order(wrapped, args, kwargs)
    takes = moe.capacity(logits, factor, least)
    if least > len(logits) or takes <= len(logits) or not moe.drops(rest[2:3]) or any(rest[5:]):
        return wrapped(*args, **kwargs)
    return moe.padded(wrapped(logits, 0.0, len(logits), *rest), takes)
