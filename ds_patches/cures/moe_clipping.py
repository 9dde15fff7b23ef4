"""Gradient clipping without ZeRO by a norm that includes the experts of all ranks."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.classes import ENGINE, FP16_UNFUSED

PATCH = Patch(
    name="moe_clipping",
    summary="without ZeRO, gradients are clipped by a norm that includes the experts of all ranks",
    remove_when="a DeepSpeed release adds up the experts' squared norms; none up to 0.19.8 does",
    upstream=upstream("issue 8475", "PR 8478", "PR 8613"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ENGINE.target("clip_fp32_gradients", "around_clip"),
        FP16_UNFUSED.target("unscale_and_clip_grads", "around_unscale"),
    ),
    dependencies=(
        Dependency(
            "deepspeed.utils.groups",
            "_get_expert_parallel_group",
            "ranks that share a layer's experts",
        ),
    ),
)

apply, unapply, is_applied = api.of(__name__)


def around_clip(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Clip fp32 gradients by a norm with all experts, not by the ranks' mean. Collective."""
    if not engine.has_moe_layers or engine.mpu is not None:
        return wrapped(*args, **kwargs)
    from ds_patches.upstream import moe

    params = [*engine.module.parameters()]
    norm = moe.total_norm(params)
    factor = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)  # as DeepSpeed's
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)
    return norm


def around_unscale(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Add the experts to the norm by which DeepSpeed clips fp16 and bf16. Collective."""
    if optimizer.mpu is not None or not optimizer.overflow_checker.has_moe_params:
        return wrapped(*args, **kwargs)
    from ds_patches.upstream import moe

    _, *rest = in_order(wrapped, args, kwargs)
    params = [param for group in optimizer.fp16_groups for param in group]
    return wrapped(moe.set_norm(optimizer, moe.total_norm(params)), *rest)
