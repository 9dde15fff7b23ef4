"""Ulysses attention whose output has its input's layout, with the sequence first."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, Target, upstream

_LAYER = "deepspeed.sequence.layer"

PATCH = Patch(
    name="ulysses",
    summary="Ulysses returns attention in its input's layout, with the sequence first",
    remove_when="your release is 0.19.7 or later",
    upstream=upstream("PR 8317"),
    supported=">=0.16.3,<=0.19.6",
    targets=(Target(_LAYER, "_generate_layout_params", "around_layout", "<=0.19.6"),),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_layout(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Return the sequence first in the shape after an all-to-all, where DeepSpeed does not."""
    layout = wrapped(*args, **kwargs)
    scatter_dim, batch_dim, ranks, tensor = in_order(wrapped, args, kwargs)
    if batch_dim != 1 or scatter_dim >= 2:
        return layout
    length, batch_size, heads, head_dim = tensor.shape
    return (*layout[:3], [length // ranks, batch_size, ranks * heads, head_dim])
