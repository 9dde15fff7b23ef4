"""Broadcasts of parameters of no dimensions, in channels_last or transposed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch
from ds_patches.upstream.classes import ENGINE, GATHERED, INIT, INIT_BASE

PATCH = Patch(
    name="parameter_layouts",
    summary="models with a parameter without dimensions (CLIP) or in channels_last train",
    remove_when="your release is not 0.19.8",
    supported="==0.19.8",
    targets=(
        ENGINE.target("_broadcast_model", "around_broadcast"),
        GATHERED.target("_exit", "around_exit"),
        INIT.target("_convert_to_deepspeed_param", "around_convert"),
        INIT_BASE.target("patch_init_and_builtins", "around_enter"),
    ),
    dependencies=(
        INIT.needs(
            "_zero_init_param", "broadcasts and partitions a converted parameter of any shape"
        ),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_broadcast(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Flatten parameters for the engine's broadcast: 0.19.8 cannot view all of them as bytes."""
    with _flat(engine.module.parameters()):
        return wrapped(*args, **kwargs)


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """Flatten the parameters that ``GatheredParameters`` broadcasts from the modifier rank."""
    with _flat(gathered.params if gathered.src_rank is not None else ()):
        return wrapped(*args, **kwargs)


def around_convert(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """Flatten a parameter after ``zero.Init`` recorded its shape, before the broadcast."""
    (param,) = in_order(wrapped, args, kwargs)
    wrapped(*args, **kwargs)
    _flatten(param)


def around_enter(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """Flatten the parameters that ``Module.apply`` broadcasts in ``zero.Init``."""
    from torch.nn import Module  # every command reads this file, and few need torch

    wrapped(*args, **kwargs)
    if not init.override_module_apply:
        return
    gathering_apply: Any = Module.apply

    @wraps(gathering_apply)
    def apply(module: Any, function: Any) -> Any:
        @wraps(function)
        def applied(applied_module: Any) -> None:
            function(applied_module)
            for param in applied_module.parameters(recurse=False):
                if hasattr(param, "ds_id"):
                    _flatten(param)

        # DeepSpeed marks functions that it has wrapped already: these contain `applied`.
        return gathering_apply(module, function if hasattr(function, "wrapped") else applied)

    Module.apply = apply  # type: ignore[method-assign,assignment]


@contextmanager
def _flat(params: Iterable[Any]) -> Iterator[None]:
    """Flatten parameters for the length of a block; restore those that it did not partition."""
    flattened = [(*pair, param) for param in params if (pair := _flatten(param))]
    try:
        yield
    finally:
        for data, flat, param in flattened:
            if param.data.is_set_to(flat):
                param.data = data.copy_(flat.view(data.shape))


def _flatten(param: Any) -> tuple[Any, Any] | None:
    """Replace data that cannot be viewed as bytes by a flat copy. Return both, or None."""
    import torch  # every command reads this file, and few need torch

    data, strides = param.data, param.data.stride()
    # A parameter of `expand` has a stride of 0: several elements are one in memory.
    if 0 in strides or (strides[-1:] == (1,) and data.is_contiguous()):
        return None
    param.data = flat = data.clone(memory_format=torch.contiguous_format).view(-1)
    return data, flat
