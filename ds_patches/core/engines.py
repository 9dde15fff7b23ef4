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
#: An attribute that an engine gets near the end of its construction, after its optimizer's.
_LAST = "unflatten"

#: Those that were found, or built, while patches were applied.
known: WeakSet[Any] = WeakSet()
#: How many were, so far.
count = 0


def add(*engines: Any) -> None:
    """Know these, too."""
    global count
    known.update(engines)
    count += len(engines)


@once.per_call
def built() -> list[Any]:
    """Return every engine there is, but for those that ``gc.freeze()`` hides.

    One whose construction is under way, or has raised, is nobody's.
    """
    base = getattr(sys.modules.get(MODULE), "DeepSpeedEngine", None)
    dist: Any = sys.modules.get("torch.distributed")
    if base is None or dist is None or not dist.is_initialized():
        return []  # none is built, or trains, without a process group
    kinds: list[type] = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Each object refers to its class: the collector looks for that without a line of Python. What
    # else it finds is told by type(), as a proxy claims the class of what it stands for.
    found = [thing for thing in gc.get_referrers(*kinds) if issubclass(type(thing), base)]
    return [engine for engine in found if _LAST in vars(engine)]


def replacement(wrapper: Wrapper) -> str:
    """Say what stands in a wrapped method's place at a known engine or optimizer, or its class.

    Nothing where a call comes to the wrapper.
    """
    if not _replacement(wrapper):
        return ""
    gc.collect()  # nobody may hold that engine any more
    return _replacement(wrapper)


def _replacement(wrapper: Wrapper) -> str:
    for engine in [*known]:
        for thing in (engine, getattr(engine, "optimizer", None)):
            kinds = type(thing).__mro__
            if wrapper.owner not in kinds:
                continue
            value = getattr(thing, "__dict__", {}).get(wrapper.name, live.MISSING)
            if value is not live.MISSING and not live.leads_to(value, wrapper.installed):
                return f"{live.origin(value)} at one {kinds[0].__name__}"
            for kind in kinds[: kinds.index(wrapper.owner)]:
                value = live.raw(kind, wrapper.name)
                if value is live.MISSING or kind.__module__.startswith("deepspeed."):
                    continue  # DeepSpeed's own subclasses know what they do
                if not live.calls_base(value, wrapper.owner):
                    return f"{live.origin(value)} in {kind.__name__}"
    return ""
