"""The wrappers around DeepSpeed's methods."""

from __future__ import annotations

from typing import Any

import torch

from ds_patches.runtime.attributes import Args, Kwargs, Wrapped


def around_change(wrapped: Wrapped, thing: Any, args: Args, kwargs: Kwargs) -> Any:
    """What gives parameters other data: in inference mode it would be no good for training."""
    if not torch.is_inference_mode_enabled():
        return wrapped(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return wrapped(*args, **kwargs)
