"""Loading of ZeRO-3 weights by the requested tag, also with ``load_module_only``."""

import sys
from functools import partial
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.patch import Dependency, Patch
from ds_patches.upstream.classes import ENGINE

PATCH = Patch(
    name="zero3_checkpoints",
    summary="ZeRO-3 loads the weights of the requested tag, also with load_module_only",
    remove_when="a DeepSpeed release reads weights by their tag; none up to 0.19.8 does",
    upstream=(),
    supported=">=0.16.0,<=0.19.8",
    targets=(ENGINE.target("_load_checkpoint", "around_load"),),
    dependencies=(
        Dependency(
            "deepspeed.utils.zero_to_fp32",
            "get_fp32_state_dict_from_zero_checkpoint",
            "reads the weights of a tag, by default the one in the file `latest`",
        ),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)

#: The parameters of ``_load_checkpoint`` after the folder and the tag.
_OPTIONS = (
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)


def around_load(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Load weights by their tag; DeepSpeed loads those of `latest`, or none with module only."""
    folder, tag, *values = in_order(wrapped, args, kwargs)
    options = dict(zip(_OPTIONS, values, strict=False))
    loads_states = options.get("load_optimizer_states", True)
    if (
        (loads_states and not options.get("load_module_only"))
        or not engine.zero_optimization_partition_weights()
        or engine.load_universal_checkpoint()
        or engine.has_moe_layers  # their weights are read from files of their own
    ):
        return wrapped(*args, **kwargs)
    module = sys.modules[ENGINE.module]
    read = partial(module.get_fp32_state_dict_from_zero_checkpoint, tag=tag)
    # Without this, load_module_only reads the module's own weights, which are empty at ZeRO-3.
    options["load_optimizer_states"] = False
    with meanwhile(module, get_fp32_state_dict_from_zero_checkpoint=read):
        path, states = wrapped(folder, tag, **options)
    if loads_states and states:
        states.pop("optimizer", None)  # DeepSpeed returns no state that it loads
    return path, states
