"""Gradients that a script reads or gives by hand: ``safe_get_full_grad``, ``safe_set_full_grad``.

What is given is newer than all that a step has so far, and what is read is of this step: an older
step's gradient, of a parameter that this one has not reached, reads as zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from traceback import walk_stack
from typing import Any
from weakref import WeakValueDictionary

from ds_patches.runtime.engines import built

from . import engines
from .flat_sum import FlatSum
from .partition_sum import PartitionSum

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Optimizers of stages 1 and 2, by the id of the dict in which they keep offloaded gradients.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def around_get_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of the stage 3 optimizer: the gradient of a parameter, or this rank's part of it."""
    if isinstance(sum_ := _sum_of(optimizer), PartitionSum):
        sum_.settle(*args, *kwargs.values())
    return wrapped(*args, **kwargs)


def around_set_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of the stage 3 optimizer: one parameter's gradient, or a function to change several."""
    if not isinstance(sum_ := _sum_of(optimizer), PartitionSum):
        return wrapped(*args, **kwargs)
    _, params = (*args, *kwargs.values())
    ids = sum_.settle(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    sum_.given(ids)
    return result


def around_fragment(wrapped: Wrapped, fragment: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of stages 1 and 2: both reading and writing begin here, and only the callers tell which."""
    owner = _owner_of(fragment.offload_gradient_dict) if fragment.use_offload else None
    if owner is not None and isinstance(sum_ := _sum_of(owner), FlatSum):
        callers = (frame.f_code.co_name for frame, _ in islice(walk_stack(sys._getframe()), 8))
        place = (fragment.param_group_index, *args, *kwargs.values())
        sum_.settle(place, is_given="set_full_hp_grad" in callers)
    return wrapped(*args, **kwargs)


def _owner_of(gradients: Any) -> Any:
    if id(gradients) not in _owners:
        for optimizer in (vars(engine).get("optimizer") for engine in built()):
            if hasattr(optimizer, "offload_gradient_dict"):
                _owners[id(optimizer.offload_gradient_dict)] = optimizer
    return _owners.get(id(gradients))


def _sum_of(optimizer: Any) -> Any:
    steps = engines.of_optimizer(optimizer)
    return None if steps is None else steps.sum
