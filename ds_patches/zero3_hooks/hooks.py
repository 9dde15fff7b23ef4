"""The wrappers around DeepSpeed's methods."""

from __future__ import annotations

from typing import Any

import torch

from ds_patches.runtime.attributes import Args, Kwargs, Wrapped

from .upstream import trace


def around_change(wrapped: Wrapped, thing: Any, args: Args, kwargs: Kwargs) -> Any:
    """What gives parameters other data: in inference mode it would be no good for training."""
    if not torch.is_inference_mode_enabled():
        return wrapped(*args, **kwargs)
    # What torch.inference_mode is made of, without its Python; the end puts the gradient mode back.
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)
        return wrapped(*args, **kwargs)


def around_register(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of the root it registers all modules, each with a new number."""
    module = args[0] if args else kwargs["module"]
    if module is not offload.module:
        return wrapped(*args, **kwargs)
    with trace.renumbered(offload.get_param_coordinator()):
        return wrapped(*args, **kwargs)


def around_all_gather(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> Any:
    """It gives all parameters the dtype of the first; on CPU ranks it waits for the last alone."""
    params, *others = args
    if len({param.ds_tensor.dtype for param in params}) < 2:
        return wrapped(*args, **kwargs)
    for param in params:
        wrapped([param], *others, **kwargs)
    return None
