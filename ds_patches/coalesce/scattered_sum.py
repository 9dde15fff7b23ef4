"""Stages 1 and 2, past DeepSpeed's own reducer: only half of an all-reduce's bytes are sent.

Where the window's last backward was announced, on all ranks, buckets are reduced while it runs;
elsewhere one pass over everything reduces them when the window closes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from .flat_flush import Flush
from .flat_reduction import FlatLayout
from .handshake import Handshake
from .local_sum import holds_any
from .overlapped import BucketPlan, OverlappedReduction
from .upstream import flat, flat_layout
from .upstream.streams import SideStream

_plans: WeakKeyDictionary[Any, BucketPlan] = WeakKeyDictionary()  # by optimizer


def _plan_of(optimizer: Any, layout: FlatLayout) -> BucketPlan:
    if optimizer not in _plans:
        _plans[optimizer] = BucketPlan(layout, flat_layout.positions(optimizer))
    return _plans[optimizer]


class ScatteredSum:
    """The `LocalSum` of an optimizer that `flat_layout.covers`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._overlapped: OverlappedReduction | None = None
        self._flush: Flush | None = None

    def begin_last_backward(self, handshake: Handshake | None) -> None:
        """Get ready to reduce during this backward, and tell the other ranks."""
        optimizer = self._optimizer
        flat.settle(optimizer)
        layout = flat_layout.layout(optimizer)
        self._overlapped = OverlappedReduction(
            layout,
            _plan_of(optimizer, layout),
            drop=flat.clear_of,
            side=SideStream.of(optimizer),
            may_send=handshake.all_begin if handshake else lambda: True,
        )
        if handshake is not None:
            handshake.announce()

    def ready(self, param: Any, group: int) -> None:
        """Reduce what `param` was the last to fill.

        Raises RuntimeError if part of its gradient is on the wire already.
        """
        if self._overlapped is not None and flat_layout.is_complete(self._optimizer, param):
            self._overlapped.ready(param)

    def settle(self) -> None:
        flat.settle(self._optimizer)

    def meet(self, handshake: Handshake | None) -> None:
        """Send the rest of what the last backward reduced, or pack what a flush sends first.

        Raises RuntimeError if a gradient came after its parameter had been reduced.
        """
        if self._overlapped is not None and (handshake is None or handshake.await_beginning()):
            self._overlapped.finish()
        else:
            self._overlapped = None
            self._flush = _begin_flush(self._optimizer)
        if handshake is not None:
            handshake.leave()

    def replaces(self) -> bool:
        return holds_any(self._optimizer.averaged_gradients)

    def reduce(self) -> None:
        flat.begin_only_backward(self._optimizer)
        if self._overlapped is not None:
            flat_layout.deliver(self._optimizer, self._overlapped.layout)
        elif self._flush is not None:
            self._flush.reduce()
            flat_layout.deliver(self._optimizer, self._flush.layout)

    def drop(self) -> None:
        flat.drop(self._optimizer)

    def abandon(self) -> None:
        if self._overlapped is not None:
            self._overlapped.drain()


def flush(optimizer: Any) -> None:
    """Reduce the gradients on the parameters in one pass, and clear them. A collective."""
    begun = _begin_flush(optimizer)
    begun.reduce()
    flat_layout.deliver(optimizer, begun.layout)


def _begin_flush(optimizer: Any) -> Flush:
    flat_layout.release_buckets(optimizer)
    return Flush(flat_layout.layout(optimizer))
