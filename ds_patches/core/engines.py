"""The engines that there are, and what stands there in the place of wrapped methods."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ds_patches.core import live, once

if TYPE_CHECKING:
    from ds_patches.core.wrappers import Wrapper

MODULE = "deepspeed.runtime.engine"

#: Those that were found, or built, while patches were applied.
known: WeakSet[Any] = WeakSet()


@once.per_call
def built() -> list[Any]:
    """Return every engine there is, but for those that ``gc.freeze()`` hides."""
    base = getattr(sys.modules.get(MODULE), "DeepSpeedEngine", None)
    if base is None:
        return []
    kinds: list[type] = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Each object refers to its class: the collector looks for that without a line of Python. What
    # else it finds is told by type(), as a proxy claims the class of what it stands for.
    return [thing for thing in gc.get_referrers(*kinds) if issubclass(type(thing), base)]


def replacement(wrapper: Wrapper) -> str:
    """Say what stands in a wrapped method's place at a known engine or optimizer.

    Nothing where a call comes to the wrapper.
    """
    if not _replacement(wrapper):
        return ""
    gc.collect()  # nobody may hold that engine any more
    return _replacement(wrapper)


def _replacement(wrapper: Wrapper) -> str:
    for engine in [*known]:
        for thing in (engine, getattr(engine, "optimizer", None)):
            value = getattr(thing, "__dict__", {}).get(wrapper.name, wrapper.installed)
            if wrapper.owner in type(thing).__mro__ and not live.leads_to(value, wrapper.installed):
                return f"{live.origin(value)} at one {type(thing).__name__}"
    return ""
