"""Which of DeepSpeed's optimizer wrappers an engine has.

By the exact class: a subclass, as ZenFlow's, reduces and steps in a way of its own.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from ds_patches.core.patch import Class
from ds_patches.upstream import places


class Kind(Enum):
    """Return the kind of an optimizer, by its class."""

    ZERO12 = places.ZERO12
    ZERO3 = places.ZERO3
    BF16 = places.BF16
    FP16 = places.FP16
    FP16_UNFUSED = places.FP16_UNFUSED
    #: PyTorch's own, none, or one that no patch covers.
    OTHER = None


def kind_of(optimizer: Any) -> Kind:
    """Return the kind of an engine's optimizer."""
    found = type(optimizer)
    try:
        return Kind(Class(found.__module__, found.__qualname__))
    except ValueError:
        return Kind.OTHER


def is_zero12(optimizer: Any) -> bool:
    """Whether an optimizer steps by the code of stages 1 and 2. ZenFlow's does not."""
    classes = (Class(one.__module__, one.__qualname__) for one in type(optimizer).__mro__)
    return places.ZERO12 in classes and not getattr(optimizer, "zenflow", False)


def is_half(optimizer: Any) -> bool:
    """Whether an optimizer is one of the two fp16 wrappers, which partition nothing."""
    return kind_of(optimizer) in (Kind.FP16, Kind.FP16_UNFUSED)


def is_muon(optimizer: Any) -> bool:
    """Whether an optimizer has Muon inside, which orthogonalises in a backward's epilogue."""
    return "muon" in type(optimizer.optimizer).__name__.lower()
