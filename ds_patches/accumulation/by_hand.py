"""Gradients that a script reads or gives by hand at stage 3, as ``safe_set_full_grad`` does.

What is given is newer than all that a step has so far, and what is read is of this step: an older
step's gradient, of a parameter that this one has not reached, reads as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import engines
from .partition_sum import PartitionSum

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def around_get_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The gradient of a parameter, or this rank's part of it."""
    steps = vars(optimizer).get(engines.KEY) or engines.of_optimizer(optimizer)
    if steps is not None and isinstance(steps.sum, PartitionSum):
        steps.sum.settle(*args, *kwargs.values())
    return wrapped(*args, **kwargs)


def around_set_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A value for one parameter's gradient, or a function to change those of several."""
    steps = vars(optimizer).get(engines.KEY) or engines.of_optimizer(optimizer)
    if steps is None or not isinstance(steps.sum, PartitionSum):
        return wrapped(*args, **kwargs)
    _, params = (*args, *kwargs.values())
    ids = steps.sum.settle(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    steps.sum.given(ids)
    return result
