"""All-gathers of loaded ZeRO-3 weights, with hpZ and with all-reduce for fetching."""

import logging
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.classes import GATHERED, INIT, ZERO3

PATCH = Patch(
    name="zero3_weights",
    summary="ZeRO-3 gathers loaded weights right, with hpZ and with all-reduce for fetching",
    remove_when="your release is 0.19.4 or later",
    upstream=upstream("PR 7707", "PR 8158", "issue 7606"),
    supported=">=0.16.0,<=0.19.3",
    targets=(
        INIT.target("__init__", "around_init", "<=0.19.3"),
        GATHERED.target("__exit__", "around_exit", "<=0.18.2"),
        ZERO3.target("checkpoint_event_epilogue", "around_checkpoint", "<=0.18.2"),
    ),
    dependencies=(
        INIT.needs("_partition_param_sec", "creates a missing secondary partition", "<=0.18.2"),
        ZERO3.needs("invalidate_secondary_tensor", "drops the secondary partitions", "<=0.18.2"),
    ),
)

apply, unapply, is_applied = api.of(__name__)

logger = logging.getLogger("ds_patches.zero3_weights")


def around_init(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """Switch off fetching by all-reduce, which mixes up neighbouring parameters."""
    wrapped(*args, **kwargs)
    if init.use_all_reduce_for_fetch_params:
        init.use_all_reduce_for_fetch_params = False
        logger.warning(
            "stage3_use_all_reduce_for_fetch_params gathers wrong weights in this release, and was "
            "switched off: remove it from the configuration"
        )


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """Drop hpZ's secondary partitions, which are old when a rank's changes are partitioned."""
    if gathered.enabled and gathered.src_rank is not None:
        from ds_patches.upstream.zero3 import drop_secondary

        for param in gathered.params:
            drop_secondary(param)
    return wrapped(*args, **kwargs)


def around_checkpoint(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Drop hpZ's secondary partitions after a checkpoint was loaded into the primary ones."""
    optimizer.invalidate_secondary_tensor()
    return wrapped(*args, **kwargs)
