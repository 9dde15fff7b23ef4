"""What leads from a forward's outputs into its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def watch(outputs: Any, entered: Callable[[torch.Tensor], None]) -> None:
    """Call `entered` when a gradient comes to a tensor in nested tuples, lists and dicts.

    As long as the tensor lives, which has a graph behind it.
    """
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            outputs.register_hook(entered)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, (tuple, list)):
        for item in outputs:
            watch(item, entered)
    elif isinstance(outputs, dict):
        for item in outputs.values():
            watch(item, entered)
