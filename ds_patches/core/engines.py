"""The engines of this process, while any patch is applied."""

import gc
import sys
from typing import Any
from weakref import WeakSet

MODULE = "deepspeed.runtime.engine"
#: An attribute that the constructor sets near its end, after the optimizer.
_LAST = "unflatten"

#: Engines that existed when the first patch was applied, and those constructed since.
known: WeakSet[Any] = WeakSet()
#: How many engines were registered so far.
count = 0


def add(*engines: Any) -> None:
    """Register engines."""
    global count
    known.update(engines)
    count += len(engines)


def built() -> list[Any]:
    """Return all constructed engines of the process, except those hidden by ``gc.freeze()``."""
    base = getattr(sys.modules.get(MODULE), "DeepSpeedEngine", None)
    dist: Any = sys.modules.get("torch.distributed")
    if base is None or dist is None or not (dist.is_available() and dist.is_initialized()):
        return []  # no engine is constructed, or trains, without a process group
    classes: list[type] = [base]
    for engine_class in classes:  # the list grows in this loop
        classes += engine_class.__subclasses__()
    # An object refers to its class, so the collector finds it, in C. type(), not isinstance: a
    # proxy claims the class of the engine that it stands for.
    engines = [obj for obj in gc.get_referrers(*classes) if issubclass(type(obj), base)]
    return [engine for engine in engines if _LAST in vars(engine)]
