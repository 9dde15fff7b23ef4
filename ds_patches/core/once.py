"""What is looked up once in a call of the API, and anew in the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

Look = TypeVar("Look", bound=Callable[..., Any])

#: By the function that looks and its arguments, what it has found in the call under way.
_found: dict[Any, Any] | None = None


@contextmanager
def call() -> Iterator[None]:
    """While a call is under way, or one within it."""
    global _found
    outer = _found
    _found = {} if outer is None else outer
    try:
        yield
    finally:
        _found = outer


def is_under_way() -> bool:
    return _found is not None


def per_call(look: Look) -> Look:
    """Have a function look once in a call; outside of calls it looks every time."""

    @wraps(look)
    def kept(*args: Any) -> Any:
        found = _found  # read once: another thread's call may end meanwhile
        if found is None:
            return look(*args)
        if (look, args) not in found:
            found[look, args] = look(*args)
        return found[look, args]

    return kept  # type: ignore[return-value]
