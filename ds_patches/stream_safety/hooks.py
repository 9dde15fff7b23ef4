"""The wrappers around DeepSpeed's functions, and the optimizers they have met."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.engines import built
from ds_patches.core.layer import Layer
from ds_patches.steps.attached import Attached
from ds_patches.steps.graph_task import current_task_id
from ds_patches.upstream import streams
from ds_patches.upstream.accelerator import accelerator

from .order import Order


def activate() -> Sequence[str]:
    """Take in the engines that exist already."""
    for engine in built():
        if streams.overlap(engine.optimizer):
            _orders(engine.optimizer)
    return []


def deactivate() -> None:
    """Leave every optimizer as DeepSpeed made it."""
    for _, order in _orders.detach_all():
        _leave_gradients(order)
        for layer in order.layers:
            layer.remove()


def _order_of(optimizer: Any) -> Order | None:
    """None if it has no streams whose order is to be kept, as most have not."""
    if not streams.overlap(optimizer):
        return None
    order = Order(accelerator(), optimizer.reduction_stream, streams.producers(optimizer))
    order.layers += [
        Layer(optimizer, "average_tensor", partial(_tensor_is_reduced, optimizer, order)),
        Layer(optimizer, "allreduce_and_copy", partial(_gradients_are_reduced, order)),
        Layer(
            optimizer,
            "independent_gradient_partition_epilogue",
            partial(_backward_ends, optimizer, order),
        ),
        *(
            Layer(bucket, "clear", partial(_bucket_begins, bucket))
            for bucket in streams.buckets_turned_back(optimizer)
        ),
    ]
    _watch_gradients(optimizer, order)
    return order


_orders: Attached[Order] = Attached("stream_safety", _order_of)


# --- ZeRO stages 1 and 2 ------------------------------------------------------------------------


def around_init(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed makes an optimizer of stage 1 or 2: its streams are put in order from here on."""
    result = wrapped(*args, **kwargs)
    _orders(optimizer)
    return result


def _watch_gradients(optimizer: Any, order: Order) -> None:
    """Look at each gradient from now on, unless somebody else is there, as a block of coalesce."""
    method = streams.GRADIENT_METHOD
    if order.gradients is None and method not in vars(optimizer):
        order.gradients = Layer(optimizer, method, partial(_gradient_comes, order))


def _leave_gradients(order: Order) -> None:
    if order.gradients is not None:
        order.gradients.remove()
        order.gradients = None


def _gradient_comes(order: Order, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """A gradient goes into its bucket, which may be reduced before."""
    order.learn(current_task_id())
    return wrapped(*args, **kwargs)


def _tensor_is_reduced(
    optimizer: Any, order: Order, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs
) -> Any:
    """DeepSpeed all-reduces one tensor of gradients: a bucket, or a gradient that fits none.

    A step has many buckets: while all comes from one stream, this is the only call for each.
    """
    tensor = args[0] if args else in_order(wrapped, args, kwargs)[0]
    # A buffer lives until all streams have met, and a gradient that fits into one is in one.
    if tensor.numel() > optimizer.reduce_bucket_size:
        order.keep(tensor)
    elif order.waits_for_all:
        known = order.streams
        if 1 == len(known) == len(known.union(*order.producers)):
            return wrapped(*args, **kwargs)
    if order.gradients is None and order.meets_a_new_stream():
        _watch_gradients(optimizer, order)
    order.before_reduction()
    return wrapped(*args, **kwargs)


def _gradients_are_reduced(
    order: Order, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Gradients that are not contiguous are reduced here."""
    for gradient in in_order(wrapped, args, kwargs)[0]:
        order.keep(gradient)
    return wrapped(*args, **kwargs)


def _bucket_begins(bucket: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
    """A bucket begins anew, in the other buffer."""
    index = bucket.index
    wrapped(*args, **kwargs)
    bucket.index = index


def _backward_ends(
    optimizer: Any, order: Order, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs
) -> Any:
    """The last buckets are reduced, and then the host waits for the device."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        # Up to 0.19.2 nothing would tell of another stream afterwards.
        if order.has_one_stream and order.waits_for_all:
            _leave_gradients(order)


def around_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Take in an optimizer that `activate` has not found, as after gc.freeze()."""
    result = wrapped(*args, **kwargs)
    _orders(optimizer)
    return result


# --- ZeRO stage 3 -------------------------------------------------------------------------------


def around_stage3_gradient(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A gradient goes into its bucket, on the stream that reduces."""
    streams.reduction_waits(optimizer)
    return wrapped(*args, **kwargs)


def around_stage3_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The partitions are written that the next forward gathers."""
    result = wrapped(*args, **kwargs)
    streams.gather_waits(optimizer)
    return result
