"""Who waits for whom around the stream that gradients are reduced on, at ZeRO stages 1 and 2.

The reduction waits for every stream that a gradient came from. What it reads is recorded on its
stream, or the allocator hands the memory on as soon as the backward lets go of it (PyTorch issue
33909). Before each reduction every such stream waits for those that are queued already: one of them
has read the buffer that is filled next.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import current_task_id
from ds_patches.upstream.accelerator import accelerator
from ds_patches.upstream.zero12_buckets import producers, single_buffered_buckets

#: What a parameter's hook calls: its gradient goes into a bucket.
GRADIENT_METHOD = "reduce_independent_p_g_buckets_and_remove_grads"


class Order:
    """The streams of one optimizer, and the wrappers around its methods until `remove`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._accelerator = optimizer, accelerator()
        self._reduction = optimizer.reduction_stream
        # For each bucket the streams that it is being filled on, all of which DeepSpeed lets the
        # reduction wait for, as from 0.19.3 on; none: it waits for one.
        self._producers = producers(optimizer)
        self._waits_for_all = bool(self._producers)
        # Not told of which device, PyTorch asks the driver for all of them whenever it is asked for
        # the current stream; and a thread's current device need not be this one.
        self._device = getattr(self._reduction, "device_index", None)
        self._streams: set[Any] = set()  # that gradients have come from, ever
        self._task_id: int | None = None  # the last graph task in which a gradient came
        epilogue = "independent_gradient_partition_epilogue"
        self._layers = [
            Layer(optimizer, "average_tensor", self._tensor_is_reduced),
            Layer(optimizer, "allreduce_and_copy", self._gradients_are_reduced),
            Layer(optimizer, epilogue, self._backward_ends),
            *(
                Layer(bucket, "clear", partial(_bucket_begins, bucket))
                for bucket in single_buffered_buckets(optimizer)
            ),
        ]
        #: Around the method that each gradient passes, until all have come from one stream.
        self._gradients: Layer | None = None
        self._watch_gradients()

    def remove(self) -> None:
        """Leave the optimizer as DeepSpeed made it."""
        self._leave_gradients()
        for layer in self._layers:
            layer.remove()

    def _watch_gradients(self) -> None:
        """Look at each gradient from now on, unless somebody else is there, as a block is."""
        if self._gradients is None and GRADIENT_METHOD not in vars(self._optimizer):
            self._gradients = Layer(self._optimizer, GRADIENT_METHOD, self._gradient_comes)

    def _leave_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.remove()
            self._gradients = None

    def _gradient_comes(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """A gradient goes into its bucket, which may be reduced before.

        A new stream comes after all that was done. Each graph task has buffers that may have been
        allocated just now, on this stream, for all.
        """
        current, task_id = self._current(), current_task_id()
        if current not in self._streams:
            for stream in {self._reduction, *self._streams} if self._streams else ():
                current.wait_stream(stream)
            self._streams.add(current)
        if task_id != self._task_id:
            self._task_id = task_id
            for stream in self._streams - {current}:
                stream.wait_stream(current)
        return wrapped(*args, **kwargs)

    def _tensor_is_reduced(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """DeepSpeed all-reduces one tensor of gradients: a bucket, or a gradient that fits none.

        A step has many buckets: while all comes from one stream, this is the only call for each.
        """
        tensor = args[0] if args else in_order(wrapped, args, kwargs)[0]
        # A buffer lives until all streams have met, and a gradient that fits into one is in one.
        if tensor.numel() > self._optimizer.reduce_bucket_size:
            self._keep(tensor)
        elif self._waits_for_all:
            known = self._streams
            if 1 == len(known) == len(known.union(*self._producers)):
                return wrapped(*args, **kwargs)
        current = self._current()
        if self._gradients is None:
            before = len(self._streams)
            self._streams.update([current], *self._producers)
            if len(self._streams) > before:
                self._watch_gradients()
        # The streams wait for each other, but for what DeepSpeed has the current one do.
        for stream in self._streams - {current}:
            stream.wait_stream(self._reduction)
            if not self._waits_for_all:
                self._reduction.wait_stream(stream)
        return wrapped(*args, **kwargs)

    def _gradients_are_reduced(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Gradients that are not contiguous are reduced here."""
        for gradient in in_order(wrapped, args, kwargs)[0]:
            self._keep(gradient)
        return wrapped(*args, **kwargs)

    def _backward_ends(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """The last buckets are reduced, and then the host waits for the device."""
        try:
            return wrapped(*args, **kwargs)
        finally:
            # DeepSpeed's own waits are enough for one; to 0.19.2 nothing would tell of another one.
            if len(self._streams) == 1 and self._waits_for_all:
                self._leave_gradients()

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` until the reduction stream has got there."""
        tensor.record_stream(self._reduction)

    def _current(self) -> Any:
        return self._accelerator.current_stream(self._device)


def _bucket_begins(bucket: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
    """A bucket begins anew, in the other buffer."""
    index = bucket.index
    wrapped(*args, **kwargs)
    bucket.index = index
