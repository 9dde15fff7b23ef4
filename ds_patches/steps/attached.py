"""State of a patch for an engine, an optimizer or their parts, kept in the object's `__dict__`."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

State = TypeVar("State")


class Attached(Generic[State]):
    """State of an object, made when the patch first sees the object, and freed with it.

    make: returns the state of an object, or None to exclude the object from the patch.
    """

    def __init__(self, patch: str, make: Callable[[Any], State | None]) -> None:
        self.key, self._make = f"_ds_patches_{patch}", make
        self._owners: WeakSet[Any] = WeakSet()

    def __call__(self, owner: Any) -> State | None:
        """Return the state of `owner`, made at the first call; None if it is excluded."""
        if self.key not in vars(owner):
            self.set(owner, self._make(owner))
        return self.get(owner)

    def get(self, owner: Any) -> State | None:
        """Return the state of `owner`, or None if it was not made."""
        state: State | None = vars(owner).get(self.key)
        return state

    def set(self, owner: Any, state: State | None) -> None:
        """Set the state of `owner`, as for a part of an object that shares the object's state."""
        vars(owner)[self.key] = state
        self._owners.add(owner)

    def exclude(self, owner: Any) -> None:
        """Exclude `owner`, and what shares its state, from the patch from now on."""
        if (state := self.get(owner)) is not None:
            for other in [other for other in self._owners if self.get(other) is state]:
                self.set(other, None)
        self.set(owner, None)

    def all(self) -> list[tuple[Any, State]]:
        """Return every object that has a state, with its state."""
        states = [(owner, self.get(owner)) for owner in self._owners]
        return [(owner, state) for owner, state in states if state is not None]

    def detach_all(self) -> list[tuple[Any, State]]:
        """Remove the state from every object. Return the pairs that `all` returned."""
        states = self.all()
        for owner in self._owners:
            vars(owner).pop(self.key, None)
        self._owners.clear()
        return states
