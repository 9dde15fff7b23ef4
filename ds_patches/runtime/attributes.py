"""Attributes of DeepSpeed's objects that read otherwise for a while, and wrappers' types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Of a wrapper's signature: what it wraps, and what that is called with.
Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


class Shadow:
    """A function around a method at one object, which no other object's calls pass.

    around: gets the method, bound, and its arguments.
    """

    def __init__(self, thing: Any, name: str, around: Callable[..., Any]) -> None:
        self._own, self._name = vars(thing), name
        self._before = self._own.get(name)
        method = getattr(thing, name)

        def function(*args: Any, **kwargs: Any) -> Any:  # whose cells say what it leads to
            return around(method, *args, **kwargs)

        self._function = self._own[name] = function

    def remove(self) -> bool:
        """Leave the object as it was, unless another function has come in ours' place."""
        if self._own.get(self._name) is not self._function:
            return False
        if self._before is None:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before
        return True
