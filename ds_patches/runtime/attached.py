"""What a patch knows of each engine or optimizer: it lies in the object's own `__dict__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

State = TypeVar("State")


def key_of(patch: str) -> str:
    """Return the name under which a patch keeps its state of an object."""
    return f"_ds_patches_{patch}"


class Attached(Generic[State]):
    """State that is made for an object when the patch first sees it, and dies with the object.

    make: returns what there is to know of an object; None leaves the object to stock.
    """

    def __init__(self, patch: str, make: Callable[[Any], State | None]) -> None:
        self.key, self._make = key_of(patch), make
        self._objects: WeakSet[Any] = WeakSet()
        self._parts: WeakSet[Any] = WeakSet()

    def __call__(self, thing: Any) -> State | None:
        """Return the state of `thing`, which is made if there is none."""
        here = vars(thing)
        if self.key not in here:
            here[self.key] = self._make(thing)
            self._objects.add(thing)
        state: State | None = here[self.key]
        return state

    def get(self, thing: Any) -> State | None:
        """Return the state of `thing`, if it was made."""
        state: State | None = vars(thing).get(self.key)
        return state

    def share(self, part: Any, state: State) -> None:
        """Have `get` answer for a part of an object, too."""
        vars(part)[self.key] = state
        self._parts.add(part)

    def leave(self, thing: Any) -> None:
        """Leave an object to stock from now on, whatever was known of it."""
        state = vars(thing).get(self.key)
        vars(thing)[self.key] = None
        self._objects.add(thing)
        for part in self._parts if state is not None else ():
            if vars(part).get(self.key) is state:
                vars(part)[self.key] = None

    def all(self) -> list[tuple[Any, State]]:
        """Return every object that is not left to stock, with its state."""
        found = [(thing, self.get(thing)) for thing in self._objects]
        return [(thing, state) for thing, state in found if state is not None]

    def detach_all(self) -> list[tuple[Any, State]]:
        """Take the state from every object; return what `all` was."""
        found = self.all()
        for one in (*self._objects, *self._parts):
            vars(one).pop(self.key, None)
        self._objects.clear()
        self._parts.clear()
        return found
