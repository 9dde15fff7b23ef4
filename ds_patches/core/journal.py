"""What one patch has put where: to be put there again, taken back, and looked at."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from ds_patches.core import engines, live
from ds_patches.core.calls import Around
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState, all_reached

#: By the key of each target, where its layer stands, and what lies over it.
States = dict[str, tuple[WrapperState, str]]


class Journal:
    """The layers of one patch, and their targets.

    A layer stays listed after `remove`: another library may put it back, switched off, and the
    next `remove` takes it out.
    """

    def __init__(self) -> None:
        self.layers: dict[Layer, Target] = {}

    @property
    def active(self) -> bool:
        """Whether any of them takes effect."""
        return any(layer.on for layer in self.layers)

    @property
    def is_in_place(self) -> bool:
        """Whether they take effect, and none was replaced: a module is reloaded, say."""
        states = {at.key: _state(one, at)[0] for one, at in self.layers.items() if one.on}
        return all_reached([*states.values()])

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
        """Take every layer out; one that another library has wrapped over is switched off."""
        for layer in reversed(self.layers):
            layer.remove()

    def left_behind(self) -> list[str]:
        """Name the inert layers that are still in a call path, and what lies over them."""
        return [
            f"{target.key}: an inert wrapper stays beneath {live.origin(path[0])}"
            for layer, target in self.layers.items()
            if not layer.on and (path := layer.path())
        ]

    def states(self) -> States:
        """Read from the live objects where the active layers stand, also at engines.

        Of a target that was wrapped anew, the layer of now: the others may be in use still.
        """
        return {
            target.key: _at_an_engine(layer) or _state(layer, target)
            for layer, target in self.layers.items()
            if layer.on
        }

    def names_out_of_reach(self) -> list[str]:
        """Name the modules that imported a wrapped function itself before it was wrapped."""
        originals = {id(one.original) for one in self.layers if isinstance(one.owner, ModuleType)}
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
        where = live.site(target)
        if where is None or (live.raw(*where) is live.MISSING and not target.adds):
            raise AttributeError(f"{target.key} does not exist")
        there = (one for one in self.layers if (one.owner, one.name) == where)
        if not any(one.comes_back() for one in there):
            self.layers[Layer(*where, around(target))] = target


def _state(layer: Layer, target: Target) -> tuple[WrapperState, str]:
    if live.site(target) != (layer.owner, layer.name):
        return WrapperState.REPLACED, "its module, which was imported anew"
    if not (path := layer.path()):
        return WrapperState.REPLACED, live.origin(live.raw(layer.owner, layer.name))
    if foreign := next((one for one in path if not live.ours(one)), None):
        return WrapperState.WRAPPED_OVER, live.origin(foreign)
    return WrapperState.ON_TOP, ""


def _at_an_engine(layer: Layer) -> tuple[WrapperState, str] | None:
    """Say what a known engine, its optimizer or their class has in the place of a wrapped method.

    None where a call comes to the layer.
    """
    if not _replacement(layer):
        return None
    gc.collect()  # nobody may hold that engine any more
    return (WrapperState.REPLACED, by) if (by := _replacement(layer)) else None


def _replacement(layer: Layer) -> str:
    for engine in [*engines.known]:
        for thing in (engine, getattr(engine, "optimizer", None)):
            kinds = type(thing).__mro__
            if layer.owner not in kinds:
                continue
            value = getattr(thing, "__dict__", {}).get(layer.name, live.MISSING)
            if value is not live.MISSING and not live.leads_to(value, layer.installed):
                return f"{live.origin(value)} at one {kinds[0].__name__}"
            for kind in kinds[: kinds.index(layer.owner)]:
                value = live.raw(kind, layer.name)
                if value is live.MISSING or kind.__module__.startswith("deepspeed."):
                    continue  # DeepSpeed's own subclasses know what they do
                if not live.calls_base(value, layer.owner):
                    return f"{live.origin(value)} in {kind.__name__}"
    return ""
