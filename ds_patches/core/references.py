"""References by name: `"package.module:function"`, so that data needs no import."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def resolve(reference: str) -> Callable[..., Any]:
    """Import and return what `reference` names.

    Raises ImportError, AttributeError or TypeError when there is no such callable.
    """
    module, _, path = reference.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{reference} is not callable")
    return found  # type: ignore[no-any-return]
