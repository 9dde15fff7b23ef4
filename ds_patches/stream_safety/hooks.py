"""The wrappers around DeepSpeed's optimizers, and the stream order of each optimizer."""

from collections.abc import Sequence
from typing import Any

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.steps.attached import Attached
from ds_patches.upstream import zero3, zero3_gathers
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.classes import ZERO12, class_of

from .order import StreamOrder


def activate() -> Sequence[str]:
    """Wrap the optimizers of engines that exist already."""
    for engine in [*engines.known]:
        if class_of(engine.optimizer) == ZERO12:
            _orders(engine.optimizer)
    return []


def deactivate() -> None:
    """Remove the wrappers from every optimizer."""
    for _, order in _orders.detach_all():
        order.remove()


def _order_of(optimizer: Any) -> StreamOrder | None:
    """Return the stream order of an optimizer; None if it uses one stream, as most do."""
    overlaps = class_of(optimizer) == ZERO12 and optimizer.overlap_comm and not is_single_stream()
    return StreamOrder(optimizer) if overlaps else None


_orders: Attached[StreamOrder] = Attached("stream_safety", _order_of)


def around_use(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wrap the methods of an optimizer of stage 1 or 2 that reduces on its own stream.

    As it is built; or as it steps, if `activate` has not found it, as after ``gc.freeze()``.
    """
    result = wrapped(*args, **kwargs)
    _orders(optimizer)
    return result


def around_stage3_gradient(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the reduction stream wait for the backward's before it copies a gradient."""
    zero3.make_reduction_wait(optimizer)
    return wrapped(*args, **kwargs)


def around_stage3_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the next forward's all-gathers wait for the step, which writes the partitions."""
    result = wrapped(*args, **kwargs)
    zero3_gathers.make_gathers_wait(optimizer)
    return result
