"""What was put where, and how to take it back: by identity, at the place that held it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ds_patches.core import live
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState, all_reached

if TYPE_CHECKING:
    from ds_patches.core.wrappers import Around, Wrapper

#: Every wrapper that this process made, of all patches: two patches may wrap the same function.
_made: list[Wrapper] = []


class Journal:
    """The wrappers of one patch. None is ever forgotten: another library may hold one and put it
    back long after it was taken out, and the next `remove` takes it out again.
    """

    def __init__(self) -> None:
        self.wrappers: list[Wrapper] = []

    @property
    def active(self) -> bool:
        """Whether any wrapper is switched on."""
        return any(wrapper.on for wrapper in self.wrappers)

    @property
    def is_in_place(self) -> bool:
        """Whether wrappers are switched on, and none was replaced: a module is reloaded, say."""
        return all_reached([state for state, _ in self.wrapper_states().values()])

    def install(self, targets: Iterable[Target], around: Callable[[Target], Around]) -> None:
        """Wrap every target, or none: a failure takes back what was done and is raised.

        The modules of the targets must be loaded.
        """
        try:
            for target in targets:
                self._install(target, around)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take every wrapper out; one that another library buries is switched off instead."""
        for wrapper in reversed(self.wrappers):
            _take_out(wrapper)

    def left_behind(self) -> list[str]:
        """Name the inert wrappers that are still in a call path, and what lies over them."""
        return [
            f"{w.target.key}: an inert wrapper stays beneath {live.origin(path[0])}"
            for w in self.wrappers
            if not w.on and (path := _path_to(w))
        ]

    def wrapper_states(self) -> dict[str, tuple[WrapperState, str]]:
        """Read from the live objects where each active wrapper stands, and what lies over it.

        Of a target that was wrapped anew, the wrapper of now: the others may be in use still.
        """
        return {w.target.key: _state_of(w) for w in self.wrappers if w.on}

    def names_out_of_reach(self) -> list[str]:
        """Name the modules that imported a wrapped function itself before it was wrapped."""
        functions = [w for w in self.wrappers if isinstance(w.owner, ModuleType)]
        originals = {id(w.original) for w in functions if w.original is not live.MISSING}
        modules = [*sys.modules.items()] if originals else []
        return [
            f"{name}.{attribute} was imported before and still calls the original"
            for name, module in modules
            if isinstance(module, ModuleType)
            # First without a line of Python: there are a hundred thousand names.
            and not originals.isdisjoint(map(id, (values := vars(module).copy()).values()))
            for attribute, value in values.items()
            # Where it comes from it was not imported.
            if id(value) in originals and getattr(value, "__module__", None) != name
        ]

    def _install(self, target: Target, around: Callable[[Target], Around]) -> None:
        from ds_patches.core.wrappers import build  # with wrapt: not before it is needed

        where = live.site(target)
        original = live.raw(*where) if where else live.MISSING
        if where is None or (original is live.MISSING and not target.adds):
            raise AttributeError(f"{target.key} does not exist")
        for wrapper in (w for w in self.wrappers if (w.owner, w.name) == where):
            if _path_to(wrapper):  # buried since an earlier life
                wrapper.switch(True)
                return
            if wrapper.original is original:
                _put(wrapper)
                return
        wrapper = build(target, *where, original, around(target))
        self.wrappers.append(wrapper)
        _made.append(wrapper)
        _put(wrapper)


def beneath_ours(value: Any) -> Any:
    """Return what another put there, if there are wrappers of ours upon it."""
    originals = {id(wrapper.installed): wrapper.original for wrapper in _made}
    while id(value) in originals:
        value = originals[id(value)]
    return value


def _put(wrapper: Wrapper) -> None:
    setattr(wrapper.owner, wrapper.name, wrapper.installed)
    wrapper.switch(True)


def _take_out(wrapper: Wrapper) -> None:
    wrapper.switch(False)  # first, for whoever holds it
    path = _path_to(wrapper)
    if not path:
        return
    if path[0] is not wrapper.installed:
        _splice(wrapper, path)
    elif wrapper.original is live.MISSING:
        delattr(wrapper.owner, wrapper.name)
    else:
        setattr(wrapper.owner, wrapper.name, wrapper.original)


def _splice(wrapper: Wrapper, path: list[Any]) -> None:
    """Take a wrapper out from beneath the one directly above, where that one is ours."""
    for ours in _made:
        if ours.original is wrapper.installed and any(layer is ours.installed for layer in path):
            ours.rest_on(wrapper.original)


def _path_to(wrapper: Wrapper) -> list[Any]:
    """Return the layers from the owner's present value down to the wrapper; empty if replaced."""
    return live.path_to(live.raw(wrapper.owner, wrapper.name), wrapper.installed)


def _state_of(wrapper: Wrapper) -> tuple[WrapperState, str]:
    if live.site(wrapper.target) != (wrapper.owner, wrapper.name):
        return WrapperState.REPLACED, "its module, which was imported anew"
    path = _path_to(wrapper)
    if not path:
        return WrapperState.REPLACED, live.origin(live.raw(wrapper.owner, wrapper.name))
    ours = {id(w.installed) for w in _made}
    foreign = [layer for layer in path if id(layer) not in ours]
    if foreign:
        return WrapperState.WRAPPED_OVER, live.origin(foreign[0])
    return WrapperState.ON_TOP, ""
