"""Buffers in fp32 stay in fp32 beside parameters in bf16 or fp16, as in 0.19.2 and later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from ds_patches.core import api, log
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.classes import ENGINE, INIT, INIT_BASE

logger = logging.getLogger("ds_patches.fp32_buffers")

_TARGETS = (
    ENGINE.target("_configure_distributed_model", "around_configure"),
    INIT.target("_post_init_method", "around_post_init"),
    INIT_BASE.target("_add_tensor_creation_wrappers", "around_constructors"),
)

_DEPENDENCIES = (
    Dependency(
        INIT.module, "zero_wrapper_for_fp_tensor_constructor", "casts what a constructor makes"
    ),
)

PATCH = Patch(
    name="fp32_buffers",
    hooks=__name__,
    summary="buffers in fp32, such as rotary tables, stay in fp32 under bf16 and fp16",
    remove_when="zero.Init keeps the dtypes that a model names; it does not up to 0.19.8",
    upstream=upstream("PR 8066"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
)

apply, unapply, is_applied = api.of(__name__)

#: Not `empty` and `randn`, which parameters are made of: those are initialised in half precision.
_CONSTRUCTORS = ("tensor", "zeros", "ones", "full", "arange", "eye")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
#: Buffers that `zero.Init` left in another dtype than its own, by id.
_made_in_init: WeakValueDictionary[int, Any] = WeakValueDictionary()


def around_configure(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed casts the whole module, to 0.19.1, and moves it to the engine's device."""
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return wrapped(*args, **kwargs)
    from torch.nn.modules.batchnorm import _BatchNorm

    (model,) = in_order(wrapped, args, kwargs)
    before = [
        (module, f"{path}.{name}".lstrip("."), name, buffer)
        for path, module in model.named_modules()
        for name, buffer in _floating(module)
        if not isinstance(module, _BatchNorm)  # PyTorch wants its dtype to be that of the weights
    ]
    result = wrapped(*args, **kwargs)
    kept = []
    for module, path, name, buffer in before:
        now = module._buffers.get(name)
        if now is not None and now.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(now.device)
            kept.append(path)
        elif id(buffer) in _made_in_init:
            kept.append(path)
    if kept and engine.global_rank == 0:
        _say(kept)
    return result


def around_post_init(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed calls this with each module that was made in `zero.Init`."""
    (module,) = in_order(wrapped, args, kwargs)
    others = (buffer for _, buffer in _floating(module) if buffer.dtype != init.dtype)
    _made_in_init.update((id(buffer), buffer) for buffer in others)
    return wrapped(*args, **kwargs)


def around_constructors(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """`zero.Init` puts constructors into torch that cast to its dtype, whatever is named."""
    import torch

    casting = {}
    for dtype in (*(getattr(torch, name) for name in _DTYPES), init.dtype):
        with meanwhile(init, dtype=dtype):
            wrapped(*args, **kwargs)
        casting[dtype] = {name: getattr(torch, name) for name in _CONSTRUCTORS}

    def obliging(name: str) -> Callable[..., Any]:
        def construct(*given: Any, **named: Any) -> Any:
            dtype = named.get("dtype")
            return casting[dtype if dtype in casting else init.dtype][name](*given, **named)

        return construct

    for name in _CONSTRUCTORS:
        setattr(torch, name, obliging(name))


def _floating(module: Any) -> Iterator[tuple[str, Any]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            yield name, buffer


def _say(kept: list[str]) -> None:
    logger.warning(
        "Buffers stay in the dtype that the model made them in, where DeepSpeed would cast them: "
        "%s. The run computes other numbers than without this patch; to decline, also if a "
        "forward fails over dtypes now: DS_PATCHES_SKIP=fp32_buffers",
        log.named(kept),
    )
