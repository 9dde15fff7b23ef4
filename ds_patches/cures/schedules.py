"""Warmup schedules with a learning rate for each group, and a cosine that ends."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, upstream

_SCHEDULES = "deepspeed.runtime.lr_schedules"
_COSINE = Class(_SCHEDULES, "WarmupCosineLR")

PATCH = Patch(
    name="schedules",
    summary="warmup schedules keep each group's learning rate, and a cosine stays at its minimum",
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
    """Warm up each parameter group to its own rate, by default; DeepSpeed uses the first's."""
    optimizer, *rest = in_order(wrapped, args, kwargs)
    min_lr, max_lr = rest[:1], rest[1:2]
    if max_lr and max_lr[0] is not None:
        return wrapped(optimizer, *rest)
    rates = [group["lr"] for group in optimizer.param_groups]
    if max_lr:
        return wrapped(optimizer, *min_lr, rates, *rest[2:])
    return wrapped(optimizer, *min_lr, warmup_max_lr=rates)


def around_rates(wrapped: Wrapped, schedule: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return a rate for each group also before the first step, where DeepSpeed returns one."""
    rates = wrapped(*args, **kwargs)
    return rates if schedule.last_batch_iteration >= 0 else rates * len(schedule.org_lrs)


def around_ratio(wrapped: Wrapped, schedule: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the minimal ratio from the last step on; DeepSpeed's cosine rises again."""
    iteration = schedule.last_batch_iteration
    if iteration < schedule.warmup_num_steps or iteration + 1 < schedule.total_num_steps:
        return wrapped(*args, **kwargs)
    return max(0.0, schedule.cos_min_ratio)
