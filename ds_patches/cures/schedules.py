"""Warmup schedules keep each group's learning rate, and a cosine stays at its end."""

from __future__ import annotations

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, upstream

_SCHEDULES = "deepspeed.runtime.lr_schedules"
_COSINE = Class(_SCHEDULES, "WarmupCosineLR")

PATCH = Patch(
    name="schedules",
    hooks=__name__,
    summary="warmup schedules keep each group's learning rate, and a cosine stays at its end",
    remove_when="your release is 0.19.4 or later",
    upstream=upstream("PR 8171", "PR 8142", "PR 7969"),
    supported=">=0.16.0,<=0.19.3",
    targets=(
        Class(_SCHEDULES, "WarmupLR").target("__init__", "around_warmup", ">=0.17.2,<=0.19.3"),
        _COSINE.target("get_lr", "around_rates", "<=0.18.9"),
        _COSINE.target("get_lr_ratio", "around_ratio", "<=0.19.2"),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_warmup(wrapped: Wrapped, schedule: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's WarmupLR takes one greatest rate; here each group has its own, by default."""
    optimizer, *rest = in_order(wrapped, args, kwargs)
    least, greatest = rest[:1], rest[1:2]
    if greatest and greatest[0] is not None:
        return wrapped(optimizer, *rest)
    rates = [group["lr"] for group in optimizer.param_groups]
    if greatest:
        return wrapped(optimizer, *least, rates, *rest[2:])
    return wrapped(optimizer, *least, warmup_max_lr=rates)


def around_rates(wrapped: Wrapped, schedule: Any, args: Args, kwargs: Kwargs) -> Any:
    """Before the first step: one for each group."""
    rates = wrapped(*args, **kwargs)
    return rates if schedule.last_batch_iteration >= 0 else rates * len(schedule.org_lrs)


def around_ratio(wrapped: Wrapped, schedule: Any, args: Args, kwargs: Kwargs) -> Any:
    """At the last step, and behind it, the least."""
    done = schedule.last_batch_iteration
    if done < schedule.warmup_num_steps or done + 1 < schedule.total_num_steps:
        return wrapped(*args, **kwargs)
    return max(0.0, schedule.cos_min_ratio)
