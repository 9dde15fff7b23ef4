"""Flat partitions of plain tensors on the ranks, and what their reduction sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_patches.coalesce.flat_reduction import FlatGroup, FlatLayout

# --- What goes over the wire --------------------------------------------------------------------

#: By operator: which argument holds what is sent, and how often it crosses the wire, in shares of
#: (ranks - 1) / ranks.
_SENT = {"_reduce_scatter_base_": (1, 1), "allreduce_": (0, 2), "reduce_": (0, 1)}


class Traffic(TorchDispatchMode):
    """Every reduction that is started: operator and elements, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("c10d::")
        if name in _SENT:
            sent = args[_SENT[name][0]]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            self.seen.append((name, sum(tensor.numel() for tensor in tensors)))
        return function(*args, **(kwargs or {}))

    @property
    def elements(self) -> float:
        """On the wire, in shares of (ranks - 1) / ranks."""
        return sum(_SENT[name][1] * numel for name, numel in self.seen)


# --- Plain tensors ------------------------------------------------------------------------------

#: Two groups: parameters that cross partitions and chunks, are smaller than one, and a tail.
SHAPES = [[(7, 5), (3,), (11, 4), (1,), (29,)], [(5,), (2, 3)]]


@dataclass
class Problem:
    """Parameters with gradients that differ by rank, and what their mean is."""

    shapes: Sequence[Sequence[tuple[int, ...]]] = field(default_factory=lambda: SHAPES)
    grads: torch.dtype = torch.float32
    comm: torch.dtype = torch.float32
    sums: torch.dtype = torch.float32
    bucket: int = 24
    gap: int = 0  # padding behind every parameter but the last
    missing: Sequence[tuple[int, int]] = ()  # rank and number of a parameter: no gradient there
    group: Any = None  # of ranks, if it is not all of them

    def __post_init__(self) -> None:
        ranks = dist.get_world_size(self.group)
        self.params: list[Tensor] = []
        groups = []
        for shapes in self.shapes:
            params = [torch.zeros(shape, dtype=self.grads) for shape in shapes]
            offsets, end = [], 0
            for param in params:
                offsets.append(end)
                end += param.numel() + self.gap
            aligned = math.ceil((end - self.gap) / (2 * ranks)) * 2 * ranks
            whole = torch.full((aligned,), math.nan, dtype=self.sums)  # unwritten, it is seen
            partition = whole.chunk(ranks)[dist.get_rank(self.group)].clone()
            groups.append(FlatGroup(params, offsets, partition))
            self.params += params
        for number, param in enumerate(self.params):
            param.grad = self.gradient(dist.get_rank(), number)
        self.layout = FlatLayout(
            groups,
            self.group or dist.group.WORLD,
            self.comm,
            ranks,
            self.bucket,
            gradient=lambda param: param.grad,
            note_read=lambda tensor: None,
        )

    def gradient(self, rank: int, number: int) -> Tensor | None:
        if (rank, number) in self.missing:
            return None
        generator = torch.Generator().manual_seed(100 * rank + number)
        return torch.randn(self.params[number].shape, generator=generator).to(self.grads)

    def expected(self) -> list[Tensor]:
        """This rank's partitions, of sums in the communication dtype; padding is zero."""
        partitions, number = [], 0
        members = dist.get_process_group_ranks(self.group)
        ranks = len(members)
        for group in self.layout.groups:
            size = group.partition.numel()
            whole = torch.zeros(size * ranks, dtype=self.comm)
            for param, offset in zip(group.params, group.offsets, strict=True):
                for rank in members:
                    if (gradient := self.gradient(rank, number)) is not None:
                        share = (gradient / ranks).to(self.comm).view(-1)
                        whole[offset : offset + param.numel()] += share
                number += 1
            start = dist.get_rank(self.group) * size
            partitions.append(whole[start : start + size].to(self.sums))
        return partitions

    def worst(self) -> float:
        """The largest difference; NaN where nothing was written."""
        return max(
            (group.partition.float() - expected.float()).abs().max().item()
            for group, expected in zip(self.layout.groups, self.expected(), strict=True)
        )


# --- Backends ------------------------------------------------------------------------------------


@contextmanager
def without_reduce_scatter() -> Iterator[None]:
    """A backend that says about reduce-scatter what gloo said before it had it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Backend gloo does not support _reduce_scatter_base")

    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else ("reduce_scatter_tensor")
    )
    original = getattr(dist, name)
    setattr(dist, name, refuse)
    try:
        yield
    finally:
        setattr(dist, name, original)


def backend(scatters: bool) -> AbstractContextManager[None]:
    return nullcontext() if scatters else without_reduce_scatter()
