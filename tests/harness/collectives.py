"""The collectives that send gradients, in order."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Gradients(TorchDispatchMode):
    """Operator and elements of every reduction, but for those of no gradients.

    These are single numbers, as a step sums for its norm, integers, and empty buckets. Every
    collective passes PyTorch's dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d" and "reduce" in function._schema.name:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            elements = max(t.numel() if t.is_floating_point() else 0 for t in tensors)
            if elements > 1:
                self.sent.append((function._schema.name.removeprefix("c10d::"), elements))
        return function(*args, **(kwargs or {}))
