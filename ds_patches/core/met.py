"""The engines and optimizers that a patch has met, and what it knows of each.

What it knows lies in the thing's own ``__dict__`` and dies with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

State = TypeVar("State")


class Met(Generic[State]):
    """Things that are taken in when they are first met, from when the patch is applied.

    take_in: makes what there is to know of a thing; None leaves the thing to stock.
    """

    def __init__(self, patch: str, take_in: Callable[[Any], State | None]) -> None:
        self._key, self._take_in = f"_ds_patches_{patch}", take_in
        self._things: WeakSet[Any] = WeakSet()
        self._parts: WeakSet[Any] = WeakSet()

    def __call__(self, thing: Any) -> State | None:
        """What there is to know of `thing`, which is taken in if it is new."""
        here = vars(thing)
        if self._key not in here:
            here[self._key] = self._take_in(thing)
            self._things.add(thing)
        state: State | None = here[self._key]
        return state

    def known(self, thing: Any) -> State | None:
        """The same, of what is not taken in by asking."""
        state: State | None = vars(thing).get(self._key)
        return state

    def shares(self, part: Any, state: State) -> None:
        """Have `known` answer for a part of a thing, too."""
        vars(part)[self._key] = state
        self._parts.add(part)

    def all(self) -> list[tuple[Any, State]]:
        """All that are not left to stock, with what there is to know."""
        found = [(thing, self.known(thing)) for thing in self._things]
        return [(thing, state) for thing, state in found if state is not None]

    def let_go(self) -> list[tuple[Any, State]]:
        """Forget them all; return what `all` was."""
        found = self.all()
        for one in (*self._things, *self._parts):
            vars(one).pop(self._key, None)
        self._things.clear()
        self._parts.clear()
        return found
