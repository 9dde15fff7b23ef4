"""Frozen weights in checkpoints of ZeRO-1, for ``zero_to_fp32``."""

from functools import partial
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import layered
from ds_patches.core.patch import Patch
from ds_patches.upstream.classes import ENGINE

PATCH = Patch(
    name="frozen_weights",
    summary="zero_to_fp32 finds the frozen weights in a checkpoint of ZeRO 1",
    remove_when="a DeepSpeed release saves frozen weights at stage 1; none up to 0.19.8 does",
    upstream=(),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ENGINE.target("_save_checkpoint", "around_save"),
        ENGINE.target("load_module_state_dict", "around_load"),
    ),
    dependencies=(
        ENGINE.needs("_get_zero_frozen_param_attributes", "lists frozen parameters by a function"),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)

_LISTS = ("frozen_param_shapes", "frozen_param_fragments")


def around_save(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Save the list of frozen parameters at ZeRO-1 too; DeepSpeed does it at ZeRO-2 and 3."""
    is_stage1 = engine.zero_optimization_stage() == 1 and not engine.pipeline_parallelism
    if not is_stage1 or all(param.requires_grad for param in engine.module.parameters()):
        return wrapped(*args, **kwargs)
    with layered(
        engine,
        zero_optimization_partition_gradients=lambda *_: True,
        _get_zero_frozen_param_attributes=partial(_frozen_attributes, engine),
    ):
        return wrapped(*args, **kwargs)


def _frozen_attributes(engine: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return frozen parameters' shapes; when asked for values, those of all parameters.

    ``load_module_state_dict`` reads the value of each parameter that is frozen when it is called,
    which may be others. The file has them once: they share storage with the module's weights.
    """
    attributes = wrapped(*args, **kwargs)
    if any(hasattr(value, "untyped_storage") for value in attributes.values()):
        values = ((name, param.detach()) for param, name in engine.param_names.items())
        return type(attributes)(values)
    return attributes


def around_load(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ignore a list of frozen parameters by `around_save`: the module's state dict has them."""
    checkpoint, *_ = in_order(wrapped, args, kwargs)
    shapes, values = (checkpoint.get(name) or {} for name in _LISTS)
    if shapes.keys() != values.keys():  # saved by `around_save`
        checkpoint.update(dict.fromkeys(_LISTS))
    return wrapped(*args, **kwargs)
