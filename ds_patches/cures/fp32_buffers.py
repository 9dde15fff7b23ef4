"""fp32 buffers that stay fp32 beside bf16 or fp16 parameters, as in 0.19.2 and later."""

import logging
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from ds_patches.core import api, log
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.patch import Dependency, Patch, upstream
from ds_patches.upstream.classes import ENGINE, INIT, INIT_BASE

logger = logging.getLogger("ds_patches.fp32_buffers")

PATCH = Patch(
    name="fp32_buffers",
    summary="buffers in fp32, such as rotary tables, stay in fp32 under bf16 and fp16",
    remove_when="zero.Init keeps the dtypes that a model names; no release up to 0.19.8 does",
    upstream=upstream("PR 8066"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ENGINE.target("_configure_distributed_model", "around_configure"),
        INIT.target("_post_init_method", "around_post_init"),
        INIT_BASE.target("_add_tensor_creation_wrappers", "around_constructors"),
    ),
    dependencies=(
        Dependency(INIT.module, "zero_wrapper_for_fp_tensor_constructor", "casts new tensors"),
    ),
)

apply, unapply, is_applied = api.of(__name__)

#: Without `empty` and `randn`: these make parameters, which are to be in half precision.
_CONSTRUCTORS = ("tensor", "zeros", "ones", "full", "arange", "eye")
_UNCAST = (
    "Buffers stay in the dtype that the model made them in, where DeepSpeed would cast them: %s. "
    "The results differ from those without this patch. To skip it, for example if a forward now "
    "raises because of dtypes: DS_PATCHES_SKIP=fp32_buffers"
)
#: Buffers of modules built in `zero.Init` whose dtype is not that of `zero.Init`, by id.
_made_in_init: WeakValueDictionary[int, Any] = WeakValueDictionary()


def around_configure(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Restore the dtypes of buffers, which DeepSpeed up to 0.19.1 casts with the parameters."""
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return wrapped(*args, **kwargs)
    from torch.nn.modules.batchnorm import _BatchNorm

    (model,) = in_order(wrapped, args, kwargs)
    buffers = [
        (module, f"{path}.{name}".lstrip("."), name, buffer)
        for path, module in model.named_modules()
        for name, buffer in _floating_buffers(module)
        if not isinstance(module, _BatchNorm)  # PyTorch requires the dtype of its weights
    ]
    result = wrapped(*args, **kwargs)
    uncast = []
    for module, path, name, buffer in buffers:
        new_buffer = module._buffers.get(name)
        if new_buffer is not None and new_buffer.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(new_buffer.device)
            uncast.append(path)
        elif id(buffer) in _made_in_init:
            uncast.append(path)
    if uncast and engine.global_rank == 0:
        logger.warning(_UNCAST, log.named(uncast))
    return result


def around_post_init(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record the buffers of a module built in `zero.Init` that have another dtype than it.

    The engine may not cast them; `around_configure` then warns about them by this record.
    """
    (module,) = in_order(wrapped, args, kwargs)
    for _, buffer in _floating_buffers(module):
        if buffer.dtype != init.dtype:
            _made_in_init[id(buffer)] = buffer
    return wrapped(*args, **kwargs)


def around_constructors(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> None:
    """Install constructors into torch that return the dtype that the caller names.

    DeepSpeed's constructors, in `zero.Init`, cast to its dtype also if the caller names another.
    """
    import torch

    by_dtype = {}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, init.dtype):
        with meanwhile(init, dtype=dtype):
            wrapped(*args, **kwargs)
        by_dtype[dtype] = {name: getattr(torch, name) for name in _CONSTRUCTORS}

    def of_named_dtype(name: str) -> Callable[..., Any]:
        def construct(*args: Any, **kwargs: Any) -> Any:
            dtype = kwargs.get("dtype")
            return by_dtype[dtype if dtype in by_dtype else init.dtype][name](*args, **kwargs)

        return construct

    for name in _CONSTRUCTORS:
        setattr(torch, name, of_named_dtype(name))


def _floating_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the tensor of each floating-point buffer of a module itself."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            yield name, buffer
