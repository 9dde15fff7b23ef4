"""DeepSpeed sends ranks any parameter: of no dimensions, in channels_last, transposed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch
from ds_patches.upstream.classes import ENGINE, GATHERED, INIT, INIT_BASE

PATCH = Patch(
    name="parameter_layouts",
    hooks=__name__,
    summary="models with a parameter of no dimensions (CLIP), or in channels_last, can be trained",
    remove_when="your release is not 0.19.8",
    supported="==0.19.8",
    targets=(
        ENGINE.target("_broadcast_model", "around_broadcast"),
        GATHERED.target("_exit", "around_exit"),
        INIT.target("_convert_to_deepspeed_param", "around_convert"),
        INIT_BASE.target("patch_init_and_builtins", "around_enter"),
    ),
    dependencies=(
        INIT.needs("_zero_init_param", "sends and partitions what was converted, in any shape"),
    ),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_broadcast(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Flatten what DeepSpeed sends all ranks: the model that an engine is built for."""
    with _flat(engine.module.parameters()):
        return wrapped(*args, **kwargs)


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` sends one rank's parameters, and partitions them anew."""
    with _flat(gathered.params if gathered.src_rank is not None else ()):
        return wrapped(*args, **kwargs)


def around_convert(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """``zero.Init`` notes a parameter's shape, then sends and partitions it as it lies."""
    (param,) = in_order(wrapped, args, kwargs)
    wrapped(*args, **kwargs)
    _flatten(param)


def around_enter(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """In ``zero.Init``, ``Module.apply`` sends what a function has made of each module."""
    from ds_patches.upstream.zero3 import after_module_apply, is_partitioned

    def flatten(module: Any) -> None:
        for param in filter(is_partitioned, module.parameters(recurse=False)):
            _flatten(param)

    wrapped(*args, **kwargs)
    if init.override_module_apply:
        after_module_apply(flatten)


@contextmanager
def _flat(params: Iterable[Any]) -> Iterator[None]:
    """Flatten some parameters, and give back what was not partitioned meanwhile."""
    flattened = [(*both, param) for param in params if (both := _flatten(param))]
    try:
        yield
    finally:
        for data, flat, param in flattened:
            if param.data.is_set_to(flat):
                param.data = data.copy_(flat.view(data.shape))


def _flatten(param: Any) -> tuple[Any, Any] | None:
    """Give a parameter a flat copy, if it cannot be sent as it is; return its data, and that."""
    import torch  # every command reads this file, and few need torch

    data, strides = param.data, param.data.stride()
    is_sent = 0 in strides or (strides[-1:] == (1,) and data.is_contiguous())
    if is_sent:
        return None
    param.data = flat = data.clone(memory_format=torch.contiguous_format).view(-1)
    return data, flat
