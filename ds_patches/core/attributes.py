"""Attributes of DeepSpeed's objects that read otherwise for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(thing: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `thing`, and put back what they were."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
