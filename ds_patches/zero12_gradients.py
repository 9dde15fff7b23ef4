"""Gradients of ZeRO-1 and ZeRO-2 that come in tiles, or that overflow on one rank alone.

Use
    Apply it, and leave the script as it is. ``TiledMLP`` and other tiled computations (long
    sequences, ALST) then train at stages 1 and 2. With fp16 at stage 1, all ranks skip a step if
    one overflows.

Risks
    None are known.

Cost
    Two Python functions for each gradient of a program that has imported
    ``deepspeed.runtime.sequence_parallel.ulysses_sp``; for others one at each forward.

Why
    From 0.17.0 to 0.18.5 each tile's gradient takes a place in the reduce bucket, but only the last
    place is recorded, so that gradients of other parameters are mixed up. From 0.17.1 to 0.17.6
    ranks do not tell each other of an overflow at stage 1: one skips the step, and the others wait.

How
    Only whole gradients go into buckets. Ranks tell each other of an overflow.

Upstream
    Pull requests 7829 (0.18.6) and 7580 (0.18.0).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_patches.core import handles
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.places import ENGINE, ZERO12

if TYPE_CHECKING:
    from ds_patches.core.shadow import Shadow
    from ds_patches.training.kept import Attached

_TILED = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_IN_TILES = ">=0.17.0,<=0.18.5"

PATCH = Patch(
    name="zero12_gradients",
    hooks=__name__,
    summary="gradients of ZeRO-1 and ZeRO-2 that come in tiles, or overflow on one rank alone",
    remove_when="your release is 0.18.6 or later",
    upstream=upstream("PR 7829", "PR 7580"),
    supported=_IN_TILES,
    targets=(
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

apply, unapply, is_applied = handles.of(__name__)


@cache
def _shadows() -> Attached[Shadow]:
    """Return what keeps tiles out of the buckets of each engine."""
    from ds_patches.training.kept import Attached
    from ds_patches.upstream.kinds import is_zero12
    from ds_patches.upstream.zero12 import only_whole

    def make(engine: Any) -> Shadow | None:
        return only_whole(engine.optimizer) if is_zero12(engine.optimizer) else None

    return Attached(PATCH.name, make)


def deactivate() -> None:
    """Let stock put all gradients into its buckets."""
    for _, shadow in _shadows().detach_all():
        shadow.remove()


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tiled computation has no function to wrap: it lies in the backward of an autograd node."""
    if _TILED in sys.modules:
        _shadows()(engine)
    return wrapped(*args, **kwargs)


def around_overflow(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of ranks that have parts of the gradients each, also where gradients are whole: stage 1."""
    return wrapped(True)
