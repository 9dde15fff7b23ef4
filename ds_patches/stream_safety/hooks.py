"""The wrappers around DeepSpeed's functions, and the optimizers they have met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from ds_patches.core import release as releases
from ds_patches.runtime import engines
from ds_patches.runtime.attached import Attached
from ds_patches.runtime.attributes import Args, Kwargs, Shadow, Wrapped, meanwhile

from .binding import FOR_SPEED, LACKS, SAFE
from .order import Order
from .upstream import flat, stage3

#: Parts that have to know which streams gradients come from.
_PRODUCERS = ("producer_streams", "bucket_ready", "host_wait")
#: Parts that have to keep what is reduced: the first is for it, the others let it go earlier.
_KEEPS = ("record_stream", "buffer_reuse", "host_wait", "micro_steps")
#: Parts with which the host does not wait for the end of a backward.
_HOST_GOES_ON = ("host_wait", "micro_steps")
#: Parts that have something to do for each gradient.
_OF_GRADIENTS = (*_PRODUCERS, "buffer_reuse")
#: Parts that have something to do where buckets are reduced.
_OF_BUCKETS = (*FOR_SPEED, "buffer_reuse")
#: Parts that go on looking at each gradient where all come from one stream. Up to 0.19.2 nothing
#: tells of another one afterwards.
_WATCH = (*FOR_SPEED, "producer_streams")
#: Which parts are live.
_live: frozenset[str] = frozenset()
#: What the buffers may take that stay in memory while micro steps go on: 512 MiB.
_KEPT_BYTES = 2**29
#: How many buffers more than DeepSpeed's two a bucket may have: a Transformer's block takes six.
_SPARE = 6


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Turn the parts on that are asked for and for this release; name the others."""
    global _live
    asked = options["parts"].split(",")
    _live = frozenset(part for part in asked if releases.covers(LACKS[part], release))
    for engine in engines.built():
        if issubclass(type(engine.optimizer), flat.optimizer_class()):
            _orders(engine.optimizer)
        _take_in_timer(engine)
    if tuple(asked) in (SAFE, tuple(LACKS)):
        return []
    return [
        f"{part} is not live in DeepSpeed {release}: it is for {LACKS[part]}"
        for part in asked
        if part not in _live
    ]


def deactivate() -> Sequence[str]:
    """Leave every optimizer as DeepSpeed made it."""
    global _live
    _live = frozenset()
    for optimizer, order in _orders.detach_all():
        _leave_gradients(optimizer, order)
        for shadow in order.shadows:
            shadow.remove()
    return []


def _order_of(optimizer: Any) -> Order | None:
    """None if it has no streams whose order is to be kept, as most have not."""
    order = flat.order_of(optimizer)
    if order is None:
        return None
    order.shadows += [
        Shadow(optimizer, "average_tensor", partial(_tensor_is_reduced, optimizer, order)),
        Shadow(optimizer, "allreduce_and_copy", partial(_gradients_are_reduced, order)),
    ]
    _watch_gradients(optimizer, order)
    return order


_orders: Attached[Order] = Attached("stream_safety", _order_of)
#: Looked up in the `__dict__` of an optimizer by each wrapper that a step calls.
_KEY = _orders.key


# --- ZeRO stages 1 and 2 ------------------------------------------------------------------------


def around_init(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    result = wrapped(*args, **kwargs)
    _orders(optimizer)
    return result


def _watch_gradients(optimizer: Any, order: Order) -> None:
    """Look at each gradient from now on, unless somebody else is there, as a window of coalesce."""
    if order.buckets is None and not _live.isdisjoint(_OF_BUCKETS):
        around = partial(_buckets_are_reduced, optimizer, order)
        order.buckets = Shadow(optimizer, "reduce_ipg_grads", around)
    method = flat.GRADIENT_METHOD
    if order.gradients is not None or method in vars(optimizer):
        return
    if not _live.isdisjoint(_OF_GRADIENTS):
        order.gradients = Shadow(optimizer, method, partial(_gradient_comes, optimizer, order))


def _leave_gradients(optimizer: Any, order: Order) -> None:
    flat.unwatch(optimizer)
    if order.gradients is not None and order.gradients.remove():
        order.gradients = None
    if order.buckets is not None and order.buckets.remove():
        order.buckets = None


def _gradient_comes(
    optimizer: Any, order: Order, wrapped: Wrapped, *args: Any, **kwargs: Any
) -> Any:
    """A gradient goes into its bucket, which may be reduced before."""
    if order.learn() and _live.isdisjoint(FOR_SPEED):
        return wrapped(*args, **kwargs)  # DeepSpeed's own waits are enough
    by_stock = flat.has_waits_of_its_own(optimizer)
    ready = "bucket_ready" in _live and not by_stock
    reuses = "buffer_reuse" in _live and not by_stock
    if reuses:
        flat.watch(optimizer, order, _SPARE)
    if ready:
        order.backward_begins()
    with order.without_waits(backward=reuses, reduction=ready):
        result = wrapped(*args, **kwargs)
    if not _live.isdisjoint(_PRODUCERS):
        param = args[0] if args else kwargs["param"]
        order.produced(settled=ready and not flat.may_be_touched(param))
    return result


def _buckets_are_reduced(
    optimizer: Any, order: Order, wrapped: Wrapped, *args: Any, **kwargs: Any
) -> Any:
    if order.has_one_stream and _live.isdisjoint(FOR_SPEED):
        return wrapped(*args, **kwargs)
    order.reducing = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        order.reducing = False
        for buffers in flat.watched(optimizer):
            buffers.reduced()
        if not _live.isdisjoint(_HOST_GOES_ON):
            order.queued()
        if order.at_the_end is not None:
            order.at_the_end()


def _tensor_is_reduced(
    optimizer: Any, order: Order, wrapped: Wrapped, *args: Any, **kwargs: Any
) -> Any:
    """One tensor of gradients is: of a bucket, or a gradient that fits none."""
    if order.gradients is None and order.meets_a_new_stream(flat.producers(optimizer)):
        _watch_gradients(optimizer, order)
    if not _live.isdisjoint(("producer_streams", "bucket_ready")):
        order.before_reduction()
    tensor = args[0] if args else kwargs["tensor"]
    # A buffer lives until all streams have met.
    if not _live.isdisjoint(_KEEPS) and not flat.is_buffer(optimizer, tensor):
        order.keep(tensor)
    return wrapped(*args, **kwargs)


def _gradients_are_reduced(order: Order, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
    """Those that are not contiguous are."""
    if "record_stream" in _live:
        for gradient in args[0] if args else kwargs["small_bucket"]:
            order.keep(gradient)
    return wrapped(*args, **kwargs)


def around_flat_epilogue(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The last buckets are, and then the host waits for the device."""
    here = vars(optimizer)
    order: Order | None = here.get(_KEY)
    if order is None:
        result = wrapped(*args, **kwargs)
        if _KEY not in here:  # built before, and `activate` does not find what gc.freeze() hides
            _orders(optimizer)
        return result
    order.goes_on = False
    with ExitStack() as rest:
        if not flat.has_waits_of_its_own(optimizer):
            if "micro_steps" in _live and _may_go_on(optimizer):
                rest.enter_context(order.without_waits(backward=True, reduction=False))
                order.at_the_end = partial(_go_on, optimizer, order, rest)
            elif "host_wait" in _live:
                order.at_the_end = partial(_meet, optimizer, order, rest)
        try:
            return wrapped(*args, **kwargs)
        finally:
            order.at_the_end = None
            order.backward_is_over()
            if order.gradients and order.has_one_stream and _live.isdisjoint(_WATCH):
                _leave_gradients(optimizer, order)


def _meet(optimizer: Any, order: Order, rest: ExitStack) -> None:
    """Have the streams wait, and not the host. rest: of the end of the backward."""
    order.meet()
    rest.enter_context(flat.nothing_overlaps(optimizer))


def _may_go_on(optimizer: Any) -> bool:
    """Whether nobody needs the gradients yet. The buffers stay in memory for a while."""
    if not flat.adds_up(optimizer):
        return False
    return sum(buffer.nbytes for buffer in flat.buffers(optimizer)) <= _KEPT_BYTES


def _go_on(optimizer: Any, order: Order, rest: ExitStack) -> None:
    """Add up the micro steps on the reduction stream, and have nobody wait for it."""
    order.goes_on = True
    for buffer in flat.buffers(optimizer):  # which are given up now
        order.keep(buffer)
    order.queued()
    rest.enter_context(flat.nothing_overlaps(optimizer))
    rest.enter_context(order.on_reduction())


def around_finalize(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A step follows, which no backward knew of."""
    order: Order | None = vars(optimizer).get(_KEY)
    if order is not None:
        order.meet()
    return wrapped(*args, **kwargs)


def around_engine_init(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    result = wrapped(*args, **kwargs)
    _take_in_timer(engine)
    return result


def _take_in_timer(engine: Any) -> None:
    order = None if engine.optimizer is None else _orders.get(engine.optimizer)
    if order is None or "micro_steps" not in _live:
        return
    timer = engine.tput_timer
    around = partial(_timer_moves, timer, order)
    order.shadows += [Shadow(timer, method, around) for method in ("start", "stop")]


def _timer_moves(timer: Any, order: Order, wrapped: Wrapped, *args: Any, **kwargs: Any) -> None:
    """It starts or stops, and waits for the device."""
    # As ``"timers": {"throughput": {"synchronized": false}}`` has it.
    with meanwhile(timer.config, synchronized=False) if order.goes_on else nullcontext():
        wrapped(*args, **kwargs)


def around_clear(wrapped: Wrapped, bucket: Any, args: Args, kwargs: Kwargs) -> Any:
    """A bucket begins anew, in the other buffer."""
    index = bucket.index
    result = wrapped(*args, **kwargs)
    if "ping_pong" in _live:
        bucket.index = index
    return result


# --- ZeRO stage 3 -------------------------------------------------------------------------------


def around_stage3_gradient(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A gradient goes into its bucket, on the stream that reduces."""
    if "zero3_producer" in _live:
        stage3.reduction_waits(optimizer)
    return wrapped(*args, **kwargs)


def around_stage3_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The partitions are written that the next forward gathers."""
    result = wrapped(*args, **kwargs)
    if "zero3_gather" in _live:
        stage3.gather_waits(optimizer)
    return result
