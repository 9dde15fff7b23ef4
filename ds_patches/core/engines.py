"""The engines that there are."""

from __future__ import annotations

import gc
import sys
from typing import Any
from weakref import WeakSet

from ds_patches.core import once

MODULE = "deepspeed.runtime.engine"
#: An attribute that an engine gets near the end of its construction, after its optimizer's.
_LAST = "unflatten"

#: Those that were found, or built, while patches were applied.
known: WeakSet[Any] = WeakSet()
#: How many were, so far.
count = 0


def add(*engines: Any) -> None:
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
    if base is None or dist is None or not (dist.is_available() and dist.is_initialized()):
        return []  # none is built, or trains, without a process group
    kinds: list[type] = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Each object refers to its class: the collector looks for that without a line of Python. What
    # else it finds is told by type(), as a proxy claims the class of what it stands for.
    found = [thing for thing in gc.get_referrers(*kinds) if issubclass(type(thing), base)]
    return [engine for engine in found if _LAST in vars(engine)]
