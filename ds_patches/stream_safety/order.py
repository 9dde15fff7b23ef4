"""The waits between streams around the reduction stream, at ZeRO stages 1 and 2.

The reduction stream waits for every stream that a gradient came from. Tensors that it reads are
recorded on it; otherwise the allocator would reuse their memory as soon as the backward frees them
(PyTorch issue 33909). Before each reduction every such stream waits for the reductions that are
queued already, since one of them has read the buffer that is filled next.
"""

from functools import partial
from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import current_task_id
from ds_patches.upstream.accelerator import accelerator
from ds_patches.upstream.zero12_buckets import producers

#: The method to which a parameter's hook passes its gradient, for a bucket.
GRADIENT_METHOD = "reduce_independent_p_g_buckets_and_remove_grads"


class StreamOrder:
    """The streams of one optimizer, and the wrappers around its methods until `remove`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduction_stream = optimizer.reduction_stream
        # For each bucket the streams that fill it. From 0.19.3 on the reduction waits for all of
        # them; before, there is no such set, and it waits for one stream.
        self._producers = producers(optimizer)
        self._waits_for_producers = bool(self._producers)
        # Without a device index, current_stream() makes PyTorch query the driver for every device;
        # and a thread's current device may be another one.
        device = getattr(self._reduction_stream, "device_index", None)
        self._current_stream = partial(accelerator().current_stream, device)
        self._streams: set[Any] = set()  # all streams that gradients have come from
        self._task_id: int | None = None  # the graph task of the last gradient
        epilogue = "independent_gradient_partition_epilogue"
        self._layers = [
            Layer(optimizer, "average_tensor", self._around_average_tensor),
            Layer(optimizer, "allreduce_and_copy", self._around_allreduce),
            Layer(optimizer, epilogue, self._around_epilogue),
            # 0.17.2 to 0.18.4 always start in the first buffer, which may still be reduced.
            *(
                Layer(bucket, "clear", partial(_keep_buffer_index, bucket))
                for bucket in getattr(optimizer, "ipg_buckets", {}).values()
                if "index" in live.innermost(type(bucket).clear).__code__.co_names
            ),
        ]
        #: Wraps the method that each gradient passes, until a backward has used one stream only.
        self._gradient_layer: Layer | None = None
        self._watch_gradients()

    def remove(self) -> None:
        """Remove the wrappers from the optimizer."""
        self._stop_watching_gradients()
        for layer in self._layers:
            layer.remove()

    def _watch_gradients(self) -> None:
        """Wrap the method that each gradient passes, unless it is wrapped, as in a block."""
        if self._gradient_layer is None and GRADIENT_METHOD not in vars(self._optimizer):
            self._gradient_layer = Layer(self._optimizer, GRADIENT_METHOD, self._around_gradient)

    def _stop_watching_gradients(self) -> None:
        if self._gradient_layer is not None:
            self._gradient_layer.remove()
            self._gradient_layer = None

    def _around_gradient(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Order the streams before a gradient goes into its bucket, which may be reduced first.

        A stream that is seen for the first time waits for all earlier work. In each graph task
        buffers may have been allocated just now, on the current stream, for all streams.
        """
        current, task_id = self._current_stream(), current_task_id()
        if current not in self._streams:
            for stream in {self._reduction_stream, *self._streams} if self._streams else ():
                current.wait_stream(stream)
            self._streams.add(current)
        if task_id != self._task_id:
            self._task_id = task_id
            for stream in self._streams - {current}:
                stream.wait_stream(current)
        return wrapped(*args, **kwargs)

    def _around_average_tensor(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Order the streams before a bucket, or a gradient larger than one, is all-reduced.

        A step has many buckets: while gradients come from one stream, this is the only call for
        each.
        """
        tensor = args[0] if args else in_order(wrapped, args, kwargs)[0]
        # Larger tensors are gradients; others are in a buffer, which outlives the reduction.
        if tensor.numel() > self._optimizer.reduce_bucket_size:
            tensor.record_stream(self._reduction_stream)
        elif self._waits_for_producers:
            streams = self._streams
            if 1 == len(streams) == len(streams.union(*self._producers)):
                return wrapped(*args, **kwargs)
        current = self._current_stream()
        if self._gradient_layer is None:
            count = len(self._streams)
            self._streams.update([current], *self._producers)
            if len(self._streams) > count:
                self._watch_gradients()
        # DeepSpeed itself makes the reduction stream and the current stream wait.
        for stream in self._streams - {current}:
            stream.wait_stream(self._reduction_stream)
            if not self._waits_for_producers:
                self._reduction_stream.wait_stream(stream)
        return wrapped(*args, **kwargs)

    def _around_allreduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Record non-contiguous gradients on the reduction stream, before they are reduced."""
        for gradient in in_order(wrapped, args, kwargs)[0]:
            gradient.record_stream(self._reduction_stream)
        return wrapped(*args, **kwargs)

    def _around_epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Stop watching gradients after a backward whose gradients came from one stream."""
        try:
            return wrapped(*args, **kwargs)
        finally:
            # DeepSpeed's own waits suffice for one stream; to 0.19.2 a second would go unnoticed.
            if len(self._streams) == 1 and self._waits_for_producers:
                self._stop_watching_gradients()


def _keep_buffer_index(bucket: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
    """Make a bucket that is emptied start in its other buffer."""
    index = bucket.index
    wrapped(*args, **kwargs)
    bucket.index = index
