"""A backward is about to replace gradients of the same step: say so once per engine.

Outside windows DeepSpeed takes every backward at the gradient accumulation boundary for the last
of its step. Which releases then replace what an earlier one reduced, and where, is in `upstream`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ds_patches.core import claims, engines

from .upstream import flat
from .upstream.engine import is_flushing

logger = logging.getLogger("ds_patches.coalesce")

TOPIC = "lost_gradients"
PATCH = "coalesce"
_KEY = "_ds_patches_coalesce_lost"

_watched: WeakSet[Any] = WeakSet()  # optimizers
_warned_of: WeakSet[Any] = WeakSet()


class LostGradients:
    """What the backwards of one step have left in one optimizer. It lives until the step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._backwards = 0  # that reduced, in this step
        self._boundaries: list[int] = []  # which of them were at the boundary
        self._written: set[int] = set()  # stage 3: parameters, by earlier backwards
        self._writing: set[int] = set()  # and by this one

    def flat_epilogue(self, epilogue: Callable[[], Any]) -> Any:
        """Upstream's epilogue of stages 1 and 2, watched."""
        optimizer = self._optimizer
        before = dict(optimizer.averaged_gradients) if self._backwards else {}
        result = epilogue()
        now = optimizer.averaged_gradients
        replaced = any(old is not None and now.get(at) is not old for at, old in before.items())
        self._backwards += 1
        boundary = engines.at_boundary(optimizer)
        if not is_flushing(optimizer) and (
            replaced
            or (boundary and flat.offload_loses(optimizer, self._backwards, self._boundaries))
        ):
            self._warn()
        if boundary:
            self._boundaries.append(self._backwards)
        return result

    def partition(self, params: list[Any]) -> None:
        """Stage 3 is about to write the gradients of `params` to its partitions."""
        ids = {param.ds_id for param in params}
        overwrites = self._optimizer.micro_step_id == 0 and not self._written.isdisjoint(ids)
        if is_flushing(self._optimizer):
            self._written |= ids
            return
        if overwrites:
            self._warn()
        self._writing |= ids

    def backward_ended(self) -> None:
        """The reduction of a backward has ended."""
        self._written |= self._writing
        self._writing.clear()

    def _warn(self) -> None:
        if self._optimizer in _warned_of:
            return
        if claims.holder(self._optimizer, TOPIC) not in (None, PATCH):
            return  # another patch answers for it
        _warned_of.add(self._optimizer)
        logger.warning(
            "Gradients of this step were lost: DeepSpeed keeps only the last of several backwards "
            "that it takes for the last one of a step. Put the backwards of a step into `with "
            "engine.coalesce_grad_reduction():`, or set DS_PATCHES_COALESCE_LOST_GRADIENTS="
            "accumulate (=silent keeps the numbers and drops this warning). Without an offloaded "
            "optimizer, engine.set_gradient_accumulation_boundary(False) before all but the last "
            "backward is enough."
        )


def of(optimizer: Any) -> LostGradients:
    """The watch over an optimizer, from the first reduction of a step on."""
    known: LostGradients | None = vars(optimizer).get(_KEY)
    if known is None:
        _watched.add(optimizer)
        known = vars(optimizer)[_KEY] = LostGradients(optimizer)
    return known


def let_go() -> None:
    """Watch no optimizer any longer."""
    for optimizer in _watched:
        vars(optimizer).pop(_KEY, None)
    _watched.clear()
    _warned_of.clear()


def backward_ended(optimizer: Any) -> None:
    """The reduction of a backward has ended."""
    known: LostGradients | None = vars(optimizer).get(_KEY)
    if known is not None:
        known.backward_ended()


def forget(optimizer: Any) -> None:
    """A step, or ``zero_grad()``: there is nothing to lose."""
    if vars(optimizer).pop(_KEY, None) is not None:
        _watched.discard(optimizer)
