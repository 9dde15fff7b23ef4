"""The window's gradients, on the parameters of one optimizer: summed by autograd, then reduced.

Inside a window nothing is reduced, so autograd adds each backward to what is there already. When
the window closes, one reduction passes over it; if it failed, the gradients are dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .handshake import Handshake
from .upstream import flat, gathers, stage3


class LocalSum(Protocol):
    """What a window asks of the gradients of its optimizer."""

    def begin_last_backward(self, handshake: Handshake | None) -> None:
        """From here on a gradient that arrives completes its parameter's sum."""

    def ready(self, *arguments: Any) -> None:
        """The hook of a parameter ran, with these arguments."""

    def settle(self) -> None:
        """Bring every gradient to where it is summed."""

    def meet(self, handshake: Handshake | None) -> None:
        """Wait for the other ranks at the end of the window.

        What may fail on one rank alone fails here, and then, by the handshake, on all.
        """

    def replaces(self) -> bool:
        """Whether gradients of this step were reduced before."""

    def reduce(self) -> None:
        """Reduce, and leave the optimizer as the boundary backward of a step would.

        Parameters without a gradient on any rank step with zeros, not with what an old step left
        behind; where only some ranks have one, the others take part with zeros.
        """

    def drop(self) -> None:
        """Forget the gradients."""

    def abandon(self) -> None:
        """After a failure, take part in the reductions that other ranks count on."""


class _ReducedAtTheEnd:
    """By DeepSpeed's own reducer, which leaves out what has no gradient: ranks have to compare."""

    _uneven = False

    def begin_last_backward(self, handshake: Handshake | None) -> None:
        pass

    def ready(self, *arguments: Any) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _compare(self, handshake: Handshake | None, present: Iterable[bool]) -> None:
        if handshake is not None:
            self._uneven = handshake.compare(zlib.crc32(bytes(present)) & 0xFFFFFF)


class FlatSum(_ReducedAtTheEnd):
    """Stages 1 and 2."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def settle(self) -> None:
        flat.settle(self._optimizer)

    def meet(self, handshake: Handshake | None) -> None:
        optimizer = self._optimizer
        params = flat.parameters(optimizer)
        self._compare(handshake, (flat.gradient(optimizer, p) is not None for _, p in params))

    def replaces(self) -> bool:
        return holds_any(self._optimizer.averaged_gradients)

    def reduce(self) -> None:
        optimizer = self._optimizer
        flat.begin_only_backward(optimizer)
        for _, param in flat.parameters(optimizer):
            if flat.gradient(optimizer, param) is None:
                if self._uneven:
                    flat.give_zeros(optimizer, param)
                else:
                    flat.zero_offloaded(optimizer, param)
        flat.reduce(optimizer)

    def drop(self) -> None:
        flat.drop(self._optimizer)


class PartitionedSum(_ReducedAtTheEnd):
    """Stage 3."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def settle(self) -> None:
        pass

    def meet(self, handshake: Handshake | None) -> None:
        params = stage3.parameters(self._optimizer)
        self._compare(handshake, (param.grad is not None for param in params))

    def replaces(self) -> bool:
        return holds_any(self._optimizer.averaged_gradients)

    def reduce(self) -> None:
        for param in stage3.parameters(self._optimizer):
            if param.grad is None:
                if self._uneven:
                    stage3.give_zeros(param)
                else:
                    stage3.zero_partition(self._optimizer, param)
        stage3.reduce(self._optimizer)

    def drop(self) -> None:
        stage3.drop(self._optimizer)
        gathers.reset(self._optimizer.parameter_offload)


def holds_any(averaged: Mapping[int, Any]) -> bool:
    """Whether any group has reduced gradients: a step empties each, an offloaded optimizer never
    fills them."""
    return any(gradients is not None for gradients in averaged.values())
