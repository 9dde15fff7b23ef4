"""The engines whose steps are kept, and the patches that want to know of their backwards."""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.runtime.attached import Attached
from ds_patches.runtime.engines import built

from .steps import EngineSteps
from .upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

#: What other patches make of an engine listens to its steps.
_subscribers: list[Attached[Any]] = []


def _steps_of(engine: Any) -> EngineSteps | None:
    reason = upstream_engine.why_not_covered(engine)
    if reason is not None:
        if reason:
            logger.warning("accumulation leaves this engine to stock DeepSpeed: %s.", reason)
        return None
    steps = EngineSteps(engine)
    _engines.share(engine.optimizer, steps)
    if (state := upstream_engine.hook_state(engine.optimizer)) is not None:
        _engines.share(state, steps)
    for subscriber in _subscribers:
        _listen(subscriber, engine, steps)
    return steps


_engines: Attached[EngineSteps] = Attached("accumulation", _steps_of)
#: In the `__dict__` of engines that were taken in, or left to stock.
KEY = _engines.key


def of(owner: Any) -> EngineSteps | None:
    """Return what is kept of an engine, or of its optimizer; None if it is left to stock."""
    steps: EngineSteps | None = vars(owner).get(KEY)
    return steps


def take_in(engine: Any) -> EngineSteps | None:
    """Return what is kept of an engine, from its first forward on; None if it is left to stock.

    A compiler's backwards are, from the compilation on.
    """
    if engine._is_compiled and upstream_engine.is_left(engine):
        _engines.leave(engine)
    return _engines(engine)


def of_optimizer(optimizer: Any) -> EngineSteps | None:
    """Return the same as `of`, also where the optimizer's engine has had no forward yet."""
    if KEY not in vars(optimizer):
        _engines.leave(optimizer)  # if it has none: to look for it takes a while
        for engine in built():
            if vars(engine).get("optimizer") is optimizer:
                take_in(engine)
    return of(optimizer)


def subscribe(subscriber: Attached[Any]) -> None:
    """Have a listener made of each engine that is known, and of each that comes."""
    _subscribers.append(subscriber)
    for engine, steps in _engines.all():
        _listen(subscriber, engine, steps)


def _listen(subscriber: Attached[Any], engine: Any, steps: EngineSteps) -> None:
    if (listener := subscriber(engine)) is not None:
        steps.listeners.append(listener)


def unsubscribe(subscriber: Attached[Any]) -> list[Any]:
    """Make no more, and take those from the engines that there are; returns them."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)
    found = subscriber.detach_all()
    for engine, listener in found:
        if (steps := of(engine)) is not None:
            steps.listeners.remove(listener)
    return [listener for _, listener in found]


def detach_all() -> None:
    """Give every engine back to stock."""
    for _, steps in _engines.detach_all():
        steps.detach()
