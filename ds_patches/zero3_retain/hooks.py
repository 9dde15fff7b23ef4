"""The wrappers around DeepSpeed's methods, and the engines they have met.

An engine is taken in at its first forward, so one that was built before the patch was applied is
as good as one built after. What the patch knows of it lives in its own ``__dict__`` and dies with
it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_patches.core import engines
from ds_patches.core.met import Met

from .flat_sum import FlatSum
from .lost import OnLost
from .master_sum import MasterSum
from .partition_sum import PartitionSum
from .retained import RetainedEngine
from .upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.zero3_retain")

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_policy = OnLost.WARN


def _take_in(engine: Any) -> RetainedEngine | None:
    reason = upstream_engine.why_not_covered(engine)
    if reason is not None:
        if reason:
            logger.warning("zero3_retain leaves this engine to stock DeepSpeed: %s.", reason)
        return None
    state = RetainedEngine(engine, _policy)
    _engines.shares(engine.optimizer, state)
    if state.residency is not None:
        _engines.shares(engine.optimizer.parameter_offload, state)
    return state


_engines: Met[RetainedEngine] = Met("zero3_retain", _take_in)
#: Of an engine that was taken in, or of its optimizer or its parameter offload.
_state = _engines.known


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Choose what happens to gradients that stock would lose; name what is out of reach."""
    global _policy
    _policy = OnLost(options["lost_gradients"])
    from deepspeed.runtime.engine import DeepSpeedEngine

    built_before = sum(issubclass(type(thing), DeepSpeedEngine) for thing in gc.get_objects())
    if not built_before:
        return []
    return [
        f"{built_before} engine(s) built before: patched from their next forward on; a graph that "
        "exists already can still run one backward only"
    ]


def deactivate() -> Sequence[str]:
    """Put stock's functions back at every module of every engine."""
    for _, state in _engines.let_go():
        state.detach()
    return []


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    state = None if engines.is_deep_compiled(engine) else _engines(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    state.recover()
    outputs = wrapped(*args, **kwargs)
    if torch.is_grad_enabled():
        state.open_window(outputs)
    return outputs


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    state = None if engines.is_deep_compiled(engine) else _state(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    state.recover()
    with state.dropping_what_raises():
        return wrapped(*args, **kwargs)


def around_scale(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Accept the ``retain_graph`` of upstream's open pull request 8135; it is not needed here."""
    kwargs.pop("retain_graph", None)
    return wrapped(*args[:1], **kwargs)


def around_post_hook(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Skip the epilogue of ``torch.autograd.grad``: it passes the outputs, and reduces nothing."""
    state = None if engines.is_deep_compiled(engine) else _state(engine)
    # BF16_Optimizer has no hooks that count, and its epilogue takes no gradients for none.
    counts = state is not None and not isinstance(state.sum, MasterSum)
    if counts and upstream_engine.reached_no_parameter(engine):
        return upstream_engine.end_without_epilogue(engine)
    return wrapped(*args, **kwargs)


def around_zero_grad(wrapped: Wrapped, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of the engine and of its ZeRO optimizer."""
    state = _state(owner)
    result = wrapped(*args, **kwargs)
    if state is not None:
        state.zero_grad()
    return result


def around_model_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    state = _state(engine)
    if state is not None:
        state.step_begins()
    result = wrapped(*args, **kwargs)
    if state is not None:
        state.step_taken()
    return result


# --- ZeRO ---------------------------------------------------------------------------------------


def around_register(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """A module that is registered, or registered again, after its engine was taken in.

    Upstream registers the children by the same method, so each call answers for one module.
    """
    result = wrapped(*args, **kwargs)
    state = _state(offload)
    if state is not None and state.residency is not None:
        state.residency.install_at(args[0] if args else kwargs["module"])
    return result


def around_partition_grads(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    state = _state(optimizer)
    if state is None or not isinstance(state.sum, PartitionSum):
        return wrapped(*args, **kwargs)
    return state.sum.partition(wrapped, *args, **kwargs)


def around_flat_epilogue(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    state = _state(optimizer)
    if state is None or not isinstance(state.sum, FlatSum):
        return wrapped(*args, **kwargs)
    return state.flat_epilogue(wrapped)


def around_copy_to_partition(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    state = _state(optimizer)
    if state is None or not isinstance(state.sum, FlatSum):
        return wrapped(*args, **kwargs)
    return state.sum.copy_to_partition(wrapped, *args, **kwargs)
