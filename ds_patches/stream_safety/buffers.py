"""The buffers that gradients are gathered in before they are reduced.

A bucket of DeepSpeed has two: one is filled while the other is reduced. That is enough where every
bucket takes as long to reduce as the next takes to fill, and Transformers are not like that: the
gradient of a wide layer fits no buffer, and the reductions of the small ones that follow queue up
behind it; the gradient of a norm has a buffer to itself where the layer after it fills one. With
two buffers the backward then stands still until the wide one is reduced. With eight it goes on, and
leaves enough to reduce behind it for the next forward to hide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from .order import Order

SPARE_BYTES = 2**28  # for all spare buffers of a bucket: 256 MiB


class _Buffer:
    """ready: when it may be written. waited: the streams that have waited for that."""

    def __init__(self, tensor: torch.Tensor, order: Order) -> None:
        current = order.current()
        self.tensor = tensor  # just allocated, on the current stream
        self.ready = current.record_event()
        self.waited = {current}

    def reduced(self, event: Any) -> None:
        self.ready, self.waited = event, set()

    def wait(self, current: Any) -> None:
        if current not in self.waited:
            current.wait_event(self.ready)
            self.waited.add(current)


class Buffers(list[torch.Tensor]):
    """A bucket's buffers, which it takes by their index to write or to reduce.

    Whoever takes one to write waits, on its current stream, for the last reduction of it; before
    there was one, for the stream that it was allocated on. What stands at an index after its
    reduction is another buffer: a new one, for `spare` times, then the one reduced longest ago.
    """

    def __init__(self, buffers: Iterable[torch.Tensor], order: Order, spare: int = 0) -> None:
        super().__init__()
        self._order = order
        self._spare = spare
        self._at: list[_Buffer | None] = []  # each index; None after a reduction, until it is taken
        self._reduced: deque[_Buffer] = deque()  # longest ago first
        self._being_reduced: dict[int, _Buffer] = {}
        self._spared = 0
        for buffer in buffers:
            self.append(buffer)

    def append(self, buffer: torch.Tensor) -> None:
        """Just allocated, on the current stream."""
        self._at.append(_Buffer(buffer, self._order))
        super().append(buffer)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            self._taken(index)
        return super().__getitem__(index)

    def _taken(self, index: int) -> None:
        buffer = self._at[index]
        if self._order.reducing:
            if buffer is not None:  # else nothing has been written since
                self._being_reduced[index] = buffer
            return
        if buffer is None:
            buffer = self._at[index] = self._next()
            self[index] = buffer.tensor
        buffer.wait(self._order.current())

    def _next(self) -> _Buffer:
        like = self._reduced[0].tensor
        if self._spared < self._spare and (self._spared + 1) * like.nbytes <= SPARE_BYTES:
            try:
                new = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            except torch.cuda.OutOfMemoryError:
                self._spare = self._spared  # what there is has to do
            else:
                self._spared += 1
                return _Buffer(new, self._order)
        return self._reduced.popleft()

    def reduced(self) -> None:
        """What was taken to be reduced is queued on the reduction stream, and all that reads it."""
        for index, buffer in self._being_reduced.items():
            buffer.reduced(self._order.reduced())
            self._reduced.append(buffer)
            self._at[index] = None
        self._being_reduced.clear()

    def clear(self) -> None:
        """Let go of the buffers, when the backward is over and all streams have met."""
        super().clear()
        self._at.clear()
        self._reduced.clear()
        self._spared = 0

    @staticmethod
    def all_of(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a bucket, which may be of this kind."""
        reduced = buffers._reduced if isinstance(buffers, Buffers) else ()
        found = [*iter(buffers), *(buffer.tensor for buffer in reduced)]
        return list({id(buffer): buffer for buffer in found}.values())

    def plain(self) -> list[torch.Tensor]:
        """The same in a list that knows nothing."""
        return list(iter(self))
