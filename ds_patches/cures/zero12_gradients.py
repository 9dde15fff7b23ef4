"""ZeRO-1 and ZeRO-2 gradients: in tiles, in fp32 sums, with an overflow on one rank."""

import sys
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Patch, upstream
from ds_patches.steps.attached import Attached
from ds_patches.upstream.classes import BF16, ENGINE, ZERO12, class_of

_TILED_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_EMPTY_PARAMS = "<=0.19.5"
_TILES = ">=0.17.0,<=0.18.5"
_REDUCE = "reduce_independent_p_g_buckets_and_remove_grads"

PATCH = Patch(
    name="zero12_gradients",
    summary="gradients of ZeRO-1 and ZeRO-2: tiles, fp32 sums, overflow on one rank, no elements",
    remove_when="a release steps with the gradient that a script sets; none up to 0.19.8 does",
    upstream=upstream("PR 7829", "PR 7580", "PR 8280"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        BF16.target("update_hp_grads", "around_sums"),
        BF16.target("__init__", "around_init", _EMPTY_PARAMS),
        ZERO12.target("__init__", "around_init", _EMPTY_PARAMS),
        ENGINE.target("forward", "around_forward", _TILES),
        ZERO12.target("has_overflow", "around_overflow", ">=0.17.1,<=0.17.6"),
    ),
    dependencies=(
        ZERO12.needs(_REDUCE, "adds a gradient to a bucket, also if it is not ready", _TILES),
    ),
    deactivate="deactivate",
)

apply, unapply, is_applied = api.of(__name__)


def _around_reduce(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
    """Keep a tile's incomplete gradient out of the reduce bucket, as 0.18.6 does."""
    if getattr(in_order(wrapped, args, kwargs)[0], "ds_grad_is_ready", True):
        wrapped(*args, **kwargs)


def _layer_of(engine: Any) -> Layer | None:
    """Return a new wrapper that keeps tiles out of an engine's reduce buckets."""
    optimizer = engine.optimizer
    return Layer(optimizer, _REDUCE, _around_reduce) if class_of(optimizer) == ZERO12 else None


_layers: Attached[Layer] = Attached(PATCH.name, _layer_of)


def deactivate() -> None:
    """Remove the wrapper from every engine's optimizer."""
    for _, layer in _layers.detach_all():
        layer.remove()


def around_init(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """Freeze parameters of no elements, with which DeepSpeed cannot partition gradients."""
    inner, *_ = in_order(wrapped, args, kwargs)
    for group in inner.param_groups:
        for param in group["params"]:
            if not param.numel():
                param.requires_grad_(False)
    wrapped(*args, **kwargs)


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep tiles out of the buckets. They run inside an autograd node, which has no target."""
    outputs = wrapped(*args, **kwargs)
    if _TILED_MODULE in sys.modules:  # the forward may import it
        _layers(engine)
    return outputs


def around_sums(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """Expose the fp32 sums to ``safe_get_full_grad``, which reads the last micro step's."""
    import torch.distributed as dist  # every command reads this file, and few need torch

    from ds_patches.upstream.fragments import expose_gradient_sums

    wrapped(*args, **kwargs)
    if dist.get_world_size(optimizer.dp_process_group) > 1:  # on one rank DeepSpeed is right
        expose_gradient_sums(optimizer)


def around_overflow(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reduce the overflow at stage 1 too, where each rank has a part of the gradients."""
    return wrapped(True)
