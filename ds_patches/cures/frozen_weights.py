"""``zero_to_fp32`` finds frozen weights in a checkpoint of ZeRO 1.

Use
    Apply it before ``save_checkpoint``, and leave the script as it is. Then ``zero_to_fp32.py`` and
    ``get_fp32_state_dict_from_zero_checkpoint`` give all weights of a model with frozen parameters,
    as with adapters.

Risks
    None are known.

Not covered
    Checkpoints that were saved without the patch: their frozen weights are in ``module`` of
    ``mp_rank_00_model_states.pt``. DeepSpeed's MoE, and pipelines.

Cost
    None: a checkpoint names the frozen weights twice, and has them once.

Why
    DeepSpeed lists frozen parameters for ``zero_to_fp32`` at stages 2 and 3 alone. At stage 1 they
    are left out of its result without a word, in every release up to 0.19.8.

How
    They are listed at stage 1, too. When such a checkpoint is loaded, the list is not looked at.

Upstream
    No issue was found.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import layered
from ds_patches.core.patch import Patch
from ds_patches.upstream.places import ENGINE

PATCH = Patch(
    name="frozen_weights",
    hooks=__name__,
    summary="zero_to_fp32 finds frozen weights in a checkpoint of ZeRO 1",
    remove_when="a DeepSpeed release saves them at stage 1; none up to 0.19.8 does",
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
    """DeepSpeed saves the module, and lists what is frozen where gradients are partitioned."""
    is_whole = engine.zero_optimization_stage() == 1 and not engine.pipeline_parallelism
    if not is_whole or all(param.requires_grad for param in engine.module.parameters()):
        return wrapped(*args, **kwargs)
    with layered(
        engine,
        zero_optimization_partition_gradients=lambda *_: True,
        _get_zero_frozen_param_attributes=partial(_attributes, engine),
    ):
        return wrapped(*args, **kwargs)


def _attributes(engine: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Shapes of those that are frozen; then their values, which are to lie in the file once.

    Loading asks for all that are frozen by then, which may be others.
    """
    found = wrapped(*args, **kwargs)
    if any(hasattr(one, "untyped_storage") for one in found.values()):
        return type(found)((name, param.detach()) for param, name in engine.param_names.items())
    return found


def around_load(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed loads the module, and then what the checkpoint lists as frozen."""
    checkpoint, *_ = in_order(wrapped, args, kwargs)
    shapes, values = (checkpoint.get(name) or {} for name in _LISTS)
    if shapes.keys() != values.keys():  # saved by `around_save`: the module has them
        checkpoint.update(dict.fromkeys(_LISTS))
    return wrapped(*args, **kwargs)
