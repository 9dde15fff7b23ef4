"""The wrappers around DeepSpeed's methods: the block, and ``no_sync()``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from ds_patches.accumulation import engines
from ds_patches.runtime.attached import Attached
from ds_patches.runtime.attributes import Args, Kwargs, Wrapped

from . import block
from .local import LocalGradients
from .upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.coalesce")

_UNDIVIDED = (
    "engine.no_sync(): up to DeepSpeed 0.18.2 a backward in it is not divided by "
    "gradient_accumulation_steps, and one outside is: divide by hand in it"
)
_said_of: WeakSet[Any] = WeakSet()  # engines


def _take_in(engine: Any) -> LocalGradients | None:
    steps = engines.of(engine.optimizer)
    if steps is None or not upstream_engine.is_covered(engine):
        return None
    return LocalGradients(engine, steps)


_local: Attached[LocalGradients] = Attached("coalesce", _take_in)


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Take in the engines that are known already."""
    engines.subscribe(_local)
    return []


def deactivate() -> Sequence[str]:
    """Leave every engine to stock."""
    for local in engines.unsubscribe(_local):
        local.end()
    return []


def around_coalesce(
    wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs
) -> AbstractContextManager[None]:
    """Reduce the gradients of several backwards at once; see ``ds_patches.coalesce``."""
    return _coalesce(engine, *args, **kwargs)


def _coalesce(engine: Any, *, gather_once: bool | None = None) -> AbstractContextManager[None]:
    upstream_engine.must_be_covered(engine)
    steps = engines.take_in(engine)
    local = _local.get(engine)
    assert steps is not None
    assert local is not None
    return block.around(engine, steps, local, gather_once)


def around_no_sync(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Where upstream refuses it, or fails."""
    if upstream_engine.has_no_sync(engine):
        if upstream_engine.leaves_undivided(engine) and engine not in _said_of:
            _said_of.add(engine)
            logger.warning(_UNDIVIDED)
        return wrapped(*args, **kwargs)
    engines.take_in(engine)
    local = _local.get(engine)
    return wrapped(*args, **kwargs) if local is None else local.no_sync()
