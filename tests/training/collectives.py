"""Counting what is sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Counts what is sent: every collective passes PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.seen[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


class Gradients(Collectives):
    """But for single numbers, as a step sums for its norm, integers, and empty buckets."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if all(leaf.numel() <= 1 or not leaf.is_floating_point() for leaf in sent):
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    @property
    def reductions(self) -> int:
        return sum(count for name, count in self.seen.items() if "reduce" in name)
