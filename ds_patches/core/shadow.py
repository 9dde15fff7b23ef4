"""The wrapper around a method at one object, which no other object's calls pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ds_patches.core import live
from ds_patches.core.calls import Wrapped

if TYPE_CHECKING:
    from ds_patches.core.wrappers import Around


class Shadow:
    """Wraps the method `name` of `thing`, from here on until `remove`.

    Taken out, it passes every call straight through, wherever somebody holds it: another library
    may have wrapped it, and may put it back.

    around: takes what the wrapper of a class takes: the method, bound; an object, which means
        nothing here; the arguments, and those with names.
    own, wrapper: `own[name]` is the wrapper, unless another one has come over it.
    """

    def __init__(self, thing: Any, name: str, around: Around) -> None:
        from ds_patches.core.wrappers import Function  # with wrapt: not before it is needed

        self._thing, self.own, self.name = thing, vars(thing), name
        self._above: Shadow | None = None
        method = getattr(thing, name)
        self._on = [True]  # a list, which wrapt looks at without a call of Python's
        wrapper: Any = Function
        self.wrapper = wrapper(method, around, enabled=self._on)
        self.wrapper._self_shadow = self
        self._put_on_top(method)

    def _put_on_top(self, method: Wrapped) -> None:
        self._before = self.own.get(self.name)  # a method of the class is not there
        self._rest_on(method)
        self.own[self.name] = self.wrapper
        if (below := self._below) is not None:
            below._above = self

    def _rest_on(self, method: Wrapped) -> None:
        self.wrapper.__wrapped__ = self._method = method

    def come_back(self) -> None:
        """Come on top again, if another library has put back what it had found before us."""
        method = getattr(self._thing, self.name)
        if not live.leads_to(method, self.wrapper):
            self._put_on_top(method)

    def remove(self) -> None:
        """Take no effect any more, and leave the object as it was, but for what others put there.

        Beneath another Shadow it is taken out; beneath a function of somebody else's it stays.
        """
        self._on.clear()
        above, below = self._above, self._below
        if self.own.get(self.name) is self.wrapper:
            if self._before is None:
                del self.own[self.name]
            else:
                self.own[self.name] = self._before
        elif above is not None:
            above._before = self._before
            above._rest_on(self._method)
        else:
            return
        if below is not None:
            below._above = above

    @property
    def _below(self) -> Shadow | None:
        """The one directly beneath."""
        found: Shadow | None = getattr(self._before, "_self_shadow", None)
        return found


@contextmanager
def shadowed(thing: Any, **arounds: Around) -> Iterator[None]:
    """Wrap methods of `thing`, by their names, for a while."""
    shadows = [Shadow(thing, name, around) for name, around in arounds.items()]
    try:
        yield
    finally:
        for shadow in shadows:
            shadow.remove()
