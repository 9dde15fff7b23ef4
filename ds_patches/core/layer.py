"""A wrapper of ours at one place: put in, taken out, and found again, by identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Around


class Layer:
    """A wrapper of ours at one place, from here on until `remove`.

    Whoever holds it after that calls straight through it.

    owner, name: a module or class and its function, which need not be there; or any object and a
        method, which only this object's calls pass.
    around: takes the function, bound; the instance, if it is of a class; the arguments, and those
        with names.
    own, original: the owner's `__dict__`, and what that held before, or MISSING.
    installed: what it holds instead, unless another wrapper has come over it.
    on: the wrapper takes effect while this list, which wrapt looks at in C, is not empty.

    Raises TypeError for anything but a function of a module or a method of instances: Dynamo goes
    past a wrapper around a classmethod or staticmethod.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        from ds_patches.core.wrappers import Function, Method  # with wrapt: not before it is needed

        self.owner, self.name, self.own, self.around = owner, name, vars(owner), around
        self.original = beneath = self.own.get(name, live.MISSING)
        is_class = isinstance(owner, type)
        if beneath is live.MISSING:
            beneath = live.Absent(owner, name, around) if is_class else getattr(owner, name)
        if isinstance(self.original, (type, *live.CARRIERS)) or not callable(beneath):
            raise TypeError(
                f"{owner.__name__}.{name} is a {type(beneath).__name__}; only functions of a "
                "module and methods of instances are wrapped"
            )
        self.on = [True]
        self._above: Layer | None = None  # of ours, directly
        kind: Any = Method if is_class else Function
        self.installed = kind(beneath, around, enabled=self.on)
        self.installed._self_layer = self
        self._put(self.installed)

    def path(self) -> list[Any]:
        """Return what lies from the owner's present value down to this; nothing if replaced."""
        return live.path_to(self.own.get(self.name, live.MISSING), self.installed)

    def comes_back(self) -> bool:
        """Switch on again, unless another library has replaced it; return whether it is on."""
        if self.own.get(self.name, live.MISSING) is self.original:
            if self.original is live.MISSING and not isinstance(self.owner, type):
                self.installed.__wrapped__ = getattr(self.owner, self.name)
            self._put(self.installed)
        elif not self.path():
            return False
        self.on[:] = [True]
        return True

    def remove(self) -> None:
        """Take no effect any more, and leave the owner as it was, but for what others put there.

        Beneath another of ours it is taken out; beneath a function of somebody else's it stays.
        """
        self.on.clear()  # first, for whoever holds it
        if self.own.get(self.name, live.MISSING) is self.installed:
            self._put(self.original)
        elif (above := self._above) is not None and above.original is self.installed:
            above.original = self.original
            above.installed.__wrapped__ = self.installed.__wrapped__
            above._rests()

    def _rests(self) -> None:
        if (below := live.ours(self.original)) is not None:
            below._above = self

    def _put(self, value: Any) -> None:
        if value is self.installed:
            self._rests()
        kind: Any = type if isinstance(self.owner, type) else object
        if value is live.MISSING:
            kind.__delattr__(self.owner, self.name)
        else:
            kind.__setattr__(self.owner, self.name, value)


@contextmanager
def layered(thing: Any, **arounds: Around) -> Iterator[None]:
    """Wrap methods of `thing`, by their names, for a while."""
    layers = [Layer(thing, name, around) for name, around in arounds.items()]
    try:
        yield
    finally:
        for layer in layers:
            layer.remove()
