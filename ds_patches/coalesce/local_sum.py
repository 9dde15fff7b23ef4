"""The window's gradients, on the parameters of one optimizer: summed by autograd, then reduced.

Inside a window nothing is reduced, so autograd adds each backward to what is there already. When
the window closes, one reduction passes over it; if it failed, the gradients are dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from . import flat_flush
from .upstream import flat, flat_layout, stage3


class LocalSum(Protocol):
    """What a window asks of the gradients of its ZeRO stage."""

    def settle(self) -> None:
        """Bring every gradient to where it is summed."""

    def pattern(self) -> int:
        """A number of 24 bits that differs where other parameters have a gradient."""

    def replaces(self) -> bool:
        """Whether gradients of this step were reduced before."""

    def reduce(self, uneven: bool) -> None:
        """Reduce, and leave the optimizer as the boundary backward of a step would.

        uneven: some rank has a gradient that another has not; there, zeros take part. Parameters
        without a gradient on any rank step with zeros, not with what an old step left behind.
        """

    def drop(self) -> None:
        """Forget the gradients."""


class FlatSum:
    """Stages 1 and 2."""

    def __init__(self, optimizer: Any, scatters: bool) -> None:
        """`scatters`: reduce-scatter past upstream's reducer, where that is known to be right."""
        self._optimizer = optimizer
        self._scatters = scatters and flat_layout.covers(optimizer)

    def settle(self) -> None:
        flat.settle(self._optimizer)

    def pattern(self) -> int:
        params = flat.parameters(self._optimizer)
        return _pattern(flat.gradient(self._optimizer, param) is not None for _, param in params)

    def replaces(self) -> bool:
        return _holds_any(self._optimizer.averaged_gradients)

    def reduce(self, uneven: bool) -> None:
        optimizer = self._optimizer
        flat.begin_only_backward(optimizer)
        if self._scatters:
            flat_flush.flush(optimizer)
            return
        for _, param in flat.parameters(optimizer):
            if flat.gradient(optimizer, param) is None:
                if uneven:
                    flat.give_zeros(optimizer, param)
                else:
                    flat.zero_offloaded(optimizer, param)
        flat.reduce(optimizer)

    def drop(self) -> None:
        flat.drop(self._optimizer)


class PartitionedSum:
    """Stage 3."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def settle(self) -> None:
        pass

    def pattern(self) -> int:
        return _pattern(param.grad is not None for param in stage3.parameters(self._optimizer))

    def replaces(self) -> bool:
        return _holds_any(self._optimizer.averaged_gradients)

    def reduce(self, uneven: bool) -> None:
        for param in stage3.parameters(self._optimizer):
            if param.grad is None:
                if uneven:
                    stage3.give_zeros(param)
                else:
                    stage3.zero_partition(self._optimizer, param)
        stage3.reduce(self._optimizer)

    def drop(self) -> None:
        stage3.drop(self._optimizer)
        stage3.reset_gathers(self._optimizer)


def _pattern(present: Iterable[bool]) -> int:
    return zlib.crc32(bytes(present)) & 0xFFFFFF


def _holds_any(averaged: Mapping[int, Any]) -> bool:
    """A step empties each group's; an offloaded optimizer never fills them."""
    return any(gradients is not None for gradients in averaged.values())
