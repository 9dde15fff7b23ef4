"""Who waits for whom around the stream that gradients are reduced on.

The reduction waits for every stream that a gradient came from, until the gradient is there and no
longer. What it reads is recorded on its stream, or the allocator hands the memory on as soon as the
backward lets go of it (PyTorch issue 33909). The backward waits for the reduction of a buffer only
where it writes into this buffer again. All of them wait before a step, and not between micro steps,
which are added up where they are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_patches.runtime.attributes import Shadow


class _Over:
    """An event that nobody has to wait for."""

    def wait(self, stream: Any) -> None:
        pass


class _WithoutWaits:
    """`Order.without_waits`; no generator, because there is one around every gradient."""

    def __init__(self, stream: Any, backward: bool, reduction: bool) -> None:
        self._here, self._backward, self._reduction = vars(stream), backward, reduction

    def __enter__(self) -> None:
        if self._backward:
            self._here["record_event"] = lambda event=None: _Over()
        if self._reduction:
            self._here["wait_stream"] = lambda stream: None

    def __exit__(self, *raised: object) -> None:
        self._here.pop("record_event", None)
        self._here.pop("wait_stream", None)


class _Kept:
    """Bytes that nobody holds any more, and that are still to be reduced.

    The host may run ahead of the device over many backwards, each of which would find the memory of
    the one before taken. As long as it waited at the end of each, as DeepSpeed has it, there were
    never more of them than one backward keeps: so many there may be.
    """

    def __init__(self) -> None:
        self.new = 0
        self._pending: deque[tuple[Any, int]] = deque()  # oldest first
        self._bytes = 0  # of the pending ones
        self._of_this = self._most = 0  # backward, of all before

    def until(self, event: Any) -> None:
        """The new ones; and have the host wait if there are too many."""
        self._pending.append((event, self.new))
        self._bytes += self.new
        self._of_this += self.new
        self.new = 0
        while self._bytes > max(self._most, self._of_this):
            event, count = self._pending.popleft()
            event.synchronize()
            self._bytes -= count

    def backward_is_over(self) -> None:
        self._most, self._of_this, self.new = max(self._most, self._of_this), 0, 0


class Order:
    """The streams of one optimizer.

    accelerator: what knows the current stream. reduction: the stream that reduces.
    """

    def __init__(self, accelerator: Any, reduction: Any) -> None:
        self._accelerator, self._reduction = accelerator, reduction
        # Not told of which device, PyTorch asks the driver for all of them whenever it is asked for
        # the current stream; and a thread's current device need not be this one.
        self._device = getattr(reduction, "device_index", None)
        # Each with an event after which its gradients are there; None if that is not known yet.
        self._producers: dict[Any, Any] = {}
        self.reducing = False
        #: Around methods of the optimizer's, and of its engine's timer.
        self.shadows: list[Shadow] = []
        #: Around the one that each gradient passes, and the one that reduces the buckets, until all
        #: gradients have come from one stream.
        self.gradients: Shadow | None = None
        self.buckets: Shadow | None = None
        self._streams: set[Any] = set()  # that gradients have come from, ever
        self._only: Any = None  # of them, while there is one: it is compared with in each bucket
        self._is_late = False  # a new one came while nobody looked at gradients
        #: What to do once the last reduction of a backward is queued; None for what stock does.
        self.at_the_end: Callable[[], None] | None = None
        #: Whether nobody has waited for the reductions of the last backward.
        self.goes_on = False
        self._kept = _Kept()

    def learn(self) -> bool:
        """A gradient comes on the current stream: whether all have come on this one."""
        current = self.current()
        if current == self._only and not self._is_late:
            return True
        is_new = current not in self._streams
        if self._is_late or (is_new and self._streams):
            # What has been done to the buffers so far comes before all that is done from here on.
            self._is_late = False
            current.wait_stream(self._reduction)
            for stream in self._streams:
                current.wait_stream(stream)
                self._producers.setdefault(stream)
        if is_new:
            self._knows({current})
        return self.has_one_stream

    def _knows(self, streams: set[Any]) -> None:
        self._streams |= streams
        self._only = next(iter(self._streams)) if len(self._streams) == 1 else None

    @property
    def has_one_stream(self) -> bool:
        """Whether all gradients so far have come from one: DeepSpeed's own waits are enough."""
        return self._only is not None

    def meets_a_new_stream(self, producers: list[Any]) -> bool:
        """A bucket is reduced: whether a stream is new of those that it was filled on."""
        producers.append(self.current())
        if all(producer == self._only for producer in producers):
            return False
        if self._streams.issuperset(producers):
            return False
        self._knows({*producers})
        self._is_late = True
        for stream in self._streams:
            self._reduction.wait_stream(stream)
        return True

    def backward_begins(self) -> None:
        """Let the reduction wait for the step before, which has read what it allocated."""
        if not self._producers:
            self.produced(settled=True)

    def produced(self, settled: bool) -> None:
        """The current stream has queued work on a gradient; if that is settled, all of it."""
        current = self.current()
        self._producers[current] = current.record_event() if settled else None

    def before_reduction(self) -> None:
        """Let the reduction wait for all of them, and where that is not settled, for the stream."""
        if self.has_one_stream and self.current() != self._only:
            self._reduction.wait_stream(self._only)  # as DeepSpeed does for the current one
        for producer, event in self._producers.items():
            self._reduction.wait_event(event or producer.record_event())

    def meet(self) -> None:
        """Let the current stream wait for all others, and the producers for it."""
        self.goes_on = False
        current = self.current()
        for stream in (*self._producers, self._reduction):
            current.wait_stream(stream)
        for stream in self._producers:
            stream.wait_stream(current)

    def on_reduction(self) -> AbstractContextManager[Any]:
        """What is queued inside comes after all reductions."""
        inside: AbstractContextManager[Any] = self._accelerator.stream(self._reduction)
        return inside

    def backward_is_over(self) -> None:
        """Its streams need not be those of the next."""
        self._producers.clear()
        self._kept.backward_is_over()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` until the reduction stream has got there."""
        tensor.record_stream(self._reduction)
        self._kept.new += tensor.nbytes

    def queued(self) -> None:
        """All that reads what was kept is."""
        if self._kept.new:
            self._kept.until(self.reduced())

    def current(self) -> Any:
        return self._accelerator.current_stream(self._device)

    def reduced(self) -> Any:
        """An event: what is queued on the reduction stream by now."""
        return type(self._reduction).record_event(self._reduction)

    def without_waits(self, *, backward: bool, reduction: bool) -> AbstractContextManager[None]:
        """Inside, nobody waits for a whole stream.

        backward: does not wait for the reduction. reduction: does not wait for the backward. What
        they have to wait for they are told by `Buffers`, and by `before_reduction`.
        """
        return _WithoutWaits(self._reduction, backward, reduction)
