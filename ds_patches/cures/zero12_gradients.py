"""Gradients of ZeRO-1 and ZeRO-2: in tiles, in fp32 sums, and those that overflow on one rank.

Use
    Apply it, and leave the script as it is. ``TiledMLP`` and other tiled computations (long
    sequences, ALST) then train at stages 1 and 2. With fp16 at stage 1, all ranks skip a step if
    one overflows. At stage 1 with bf16 and fp32 sums ``safe_get_full_grad`` reads the step's sums,
    averaged over the ranks, and ``safe_set_full_grad`` sets what is stepped; from 0.18.5 to 0.18.9
    with ``accumulation``. A parameter of no elements does no harm.

Risks
    With fp32 sums on several ranks ``param.grad`` is None after a backward, as at ZeRO-2.

Cost
    Two Python functions for each gradient of a program that has imported
    ``deepspeed.runtime.sequence_parallel.ulysses_sp``; for others one at each forward. With fp32
    sums gradients in half precision are freed, where stock fills them with zeros.

Why
    From 0.17.0 to 0.18.5 each tile's gradient takes a place in the reduce bucket, but only the last
    place is recorded, so that gradients of other parameters are mixed up. From 0.17.1 to 0.17.6
    ranks do not tell each other of an overflow at stage 1: one skips the step, and the others wait.

    The gradient of the last micro step stays beside fp32 sums, and is what is set and, to 0.19.7,
    read, though nothing steps with it. The sums are whole on each rank, which is asked for a part.

    To 0.19.5 a parameter of no elements has no place in a partition, where one is looked for.

How
    Only whole gradients go into buckets. Ranks tell each other of an overflow. Each rank hands out
    its parts of the fp32 sums, and no other gradient is left. A parameter of no elements is frozen.

Upstream
    Pull requests 7829 (0.18.6), 7580 (0.18.0) and 8280 (0.19.6). Fp32 sums are read right from
    0.19.8 on.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.places import BF16, ENGINE, ZERO12

if TYPE_CHECKING:
    from ds_patches.core.layer import Layer
    from ds_patches.steps.attached import Attached

_TILED = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_WITH_EMPTY = "<=0.19.5"
_IN_TILES = ">=0.17.0,<=0.18.5"

PATCH = Patch(
    name="zero12_gradients",
    hooks=__name__,
    summary="gradients of ZeRO-1 and ZeRO-2: tiles, fp32 sums, overflow on one rank, none at all",
    remove_when="a release steps with the gradient that a script sets; none up to 0.19.8 does",
    upstream=upstream("PR 7829", "PR 7580", "PR 8280"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        BF16.target("update_hp_grads", "around_sums"),
        BF16.target("__init__", "around_init", _WITH_EMPTY),
        ZERO12.target("__init__", "around_init", _WITH_EMPTY),
        ENGINE.target("forward", "around_forward", _IN_TILES),
        ZERO12.target("has_overflow", "around_overflow", ">=0.17.1,<=0.17.6"),
    ),
    dependencies=(
        ZERO12.needs(
            "reduce_independent_p_g_buckets_and_remove_grads",
            "puts a gradient into a bucket, and names none that is not ready",
            _IN_TILES,
        ),
    ),
    deactivate="deactivate",
)

apply, unapply, is_applied = api.of(__name__)


@cache
def _layers() -> Attached[Layer]:
    """Return what keeps tiles out of the buckets of each engine."""
    from ds_patches.steps.attached import Attached
    from ds_patches.upstream.kinds import is_zero12
    from ds_patches.upstream.zero12 import only_whole

    def make(engine: Any) -> Layer | None:
        return only_whole(engine.optimizer) if is_zero12(engine.optimizer) else None

    return Attached(PATCH.name, make)


def deactivate() -> None:
    """Let stock put all gradients into its buckets."""
    for _, layer in _layers().detach_all():
        layer.remove()


def around_init(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed partitions what requires a gradient; here, no parameter that has no elements."""
    inner, *_ = in_order(wrapped, args, kwargs)
    for group in inner.param_groups:
        for param in group["params"]:
            if not param.numel():
                param.requires_grad_(False)
    wrapped(*args, **kwargs)


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tiled computation has no function to wrap: it lies in the backward of an autograd node."""
    outputs = wrapped(*args, **kwargs)
    if _TILED in sys.modules:  # a forward may import it
        _layers()(engine)
    return outputs


def around_sums(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """Called at the end of each backward, for bf16 parameters with fp32 gradients."""
    import torch.distributed as dist  # every command reads this file, and few need torch

    from ds_patches.upstream.fragments import read_sums

    wrapped(*args, **kwargs)
    if dist.get_world_size(optimizer.dp_process_group) > 1:  # else it may read right
        read_sums(optimizer)


def around_overflow(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ask all ranks for an overflow, also at stage 1: each has a part of the gradients."""
    return wrapped(True)
