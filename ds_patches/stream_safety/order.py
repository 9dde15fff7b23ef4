"""Who waits for whom around the stream that gradients are reduced on.

The reduction waits for every stream that a gradient came from. What it reads is recorded on its
stream, or the allocator hands the memory on as soon as the backward lets go of it (PyTorch issue
33909). Before each reduction every such stream waits for those that are queued already: one of them
has read the buffer that is filled next.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_patches.core.layer import Layer


class Order:
    """The streams of one optimizer.

    accelerator: what knows the current stream. reduction: the stream that reduces.
    producers: for each bucket the streams that it is being filled on, all of which DeepSpeed lets
        the reduction wait for, as from 0.19.3 on; none: it waits for one.
    streams: that gradients have come from, ever.
    """

    def __init__(self, accelerator: Any, reduction: Any, producers: list[set[Any]]) -> None:
        self._accelerator, self._reduction, self.producers = accelerator, reduction, producers
        self.waits_for_all = bool(producers)
        # Not told of which device, PyTorch asks the driver for all of them whenever it is asked for
        # the current stream; and a thread's current device need not be this one.
        self._device = getattr(reduction, "device_index", None)
        #: Around the optimizer's methods.
        self.layers: list[Layer] = []
        #: Around the one that each gradient passes, until all have come from one stream.
        self.gradients: Layer | None = None
        self.streams: set[Any] = set()
        self._task_id: int | None = None  # the last graph task in which a gradient came

    def learn(self, task_id: int) -> None:
        """A gradient comes on the current stream, in a graph task.

        A new stream comes after all that was done. Each task has buffers that may have been
        allocated just now, on this stream, for all.
        """
        current = self.current()
        if current not in self.streams:
            for stream in {self._reduction, *self.streams} if self.streams else ():
                current.wait_stream(stream)
            self.streams.add(current)
        if task_id != self._task_id:
            self._task_id = task_id
            for stream in self.streams - {current}:
                stream.wait_stream(current)

    def meets_a_new_stream(self) -> bool:
        """A bucket is reduced: whether a stream is new of those that it was filled on."""
        known = len(self.streams)
        self.streams.update([self.current()], *self.producers)
        return len(self.streams) > known

    @property
    def has_one_stream(self) -> bool:
        """Whether all gradients so far have come from one: DeepSpeed's own waits are enough."""
        return len(self.streams) == 1

    def before_reduction(self) -> None:
        """Let the streams wait for each other, but for what DeepSpeed has the current one do."""
        for stream in self.streams - {self.current()}:
            stream.wait_stream(self._reduction)
            if not self.waits_for_all:
                self._reduction.wait_stream(stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` until the reduction stream has got there."""
        tensor.record_stream(self._reduction)

    def current(self) -> Any:
        return self._accelerator.current_stream(self._device)
