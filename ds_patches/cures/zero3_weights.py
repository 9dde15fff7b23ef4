"""ZeRO-3 gathers the weights that were loaded: with hpZ, and with all-reduce for fetching."""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.classes import GATHERED, INIT, ZERO3

PATCH = Patch(
    name="zero3_weights",
    hooks=__name__,
    summary="ZeRO-3 gathers the weights that were loaded, with hpZ and all-reduce for fetching",
    remove_when="your release is 0.19.4 or later",
    upstream=upstream("PR 7707", "PR 8158", "issue 7606"),
    supported=">=0.16.0,<=0.19.3",
    targets=(
        INIT.target("__init__", "around_init", "<=0.19.3"),
        GATHERED.target("__exit__", "around_exit", "<=0.18.2"),
        ZERO3.target("checkpoint_event_epilogue", "around_loaded", "<=0.18.2"),
    ),
    dependencies=(
        INIT.needs("_partition_param_sec", "makes a second copy where there is none", "<=0.18.2"),
        ZERO3.needs("invalidate_secondary_tensor", "drops the second copies", "<=0.18.2"),
    ),
)

apply, unapply, is_applied = api.of(__name__)

logger = logging.getLogger("ds_patches.zero3_weights")


def around_init(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed's ``zero.Init`` chooses the collective by which parameters are fetched."""
    wrapped(*args, **kwargs)
    if init.use_all_reduce_for_fetch_params:
        init.use_all_reduce_for_fetch_params = False
        logger.warning("stage3_use_all_reduce_for_fetch_params is off: wrong weights come by it")


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` partitions one rank's weights anew."""
    if gathered.enabled and gathered.src_rank is not None:
        from ds_patches.upstream.zero3 import drop_secondary

        for param in gathered.params:
            drop_secondary(param)
    return wrapped(*args, **kwargs)


def around_loaded(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A checkpoint has given partitions other values."""
    optimizer.invalidate_secondary_tensor()
    return wrapped(*args, **kwargs)
