"""The wrappers that one patch has installed: how they are installed, inspected and removed."""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from ds_patches.core import live
from ds_patches.core.calls import Around
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState

#: By the key of each target, the state of its wrapper, and why it is not on top.
States = dict[str, tuple[WrapperState, str]]


class Journal:
    """The installed wrappers of one patch, and the target of each; empty if it is not applied."""

    def __init__(self) -> None:
        self.layers: dict[Layer, Target] = {}

    @property
    def is_in_place(self) -> bool:
        """Return True if there are wrappers, and none was replaced, for example by a reload."""
        states = [state for state, _ in self.states().values()]
        return bool(states) and WrapperState.REPLACED not in states

    def install(self, targets: Iterable[Target], around: Callable[[Target], Around]) -> None:
        """Wrap every target, or none: if one raises, all are removed again.

        around: returns the wrapper of a target. The modules of the targets must be imported.
        """
        try:
            for target in targets:
                layer = self._install(target, around(target))
                self.layers[layer] = target
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove every wrapper; one beneath another library's is only switched off."""
        for layer in reversed(self.layers):
            layer.remove()
        self.layers.clear()

    def states(self) -> States:
        """Return the state of each wrapper, read from the live objects.

        A target that was wrapped twice, around a reload, has the state of its newest wrapper.
        """
        return {target.key: _state(layer, target) for layer, target in self.layers.items()}

    def names_out_of_reach(self) -> list[str]:
        """Return a note for each name that was imported from a module before it was wrapped."""
        owned = [layer for layer in self.layers if isinstance(layer.owner, ModuleType)]
        originals = {id(layer.original) for layer in owned}
        return [
            f"{name}.{attribute} was imported before and still calls the original"
            for name, module in ([*sys.modules.items()] if originals else ())
            if isinstance(module, ModuleType)
            # This test runs in C: there are a hundred thousand names.
            and not originals.isdisjoint(map(id, (values := vars(module).copy()).values()))
            for attribute, value in values.items()
            # The module that defines it did not import it.
            if id(value) in originals and getattr(value, "__module__", None) != name
        ]

    def _install(self, target: Target, around: Around) -> Layer:
        site = live.site(target)
        if site is None or live.raw(*site) is live.MISSING:
            raise AttributeError(f"{target.key} does not exist")
        for value in live.chain(live.raw(*site)):
            layer: Layer | None = live.layer_of(value)
            if layer is not None and layer.around is around:
                # It was removed while another library held it, and is switched on again: else that
                # library could put back a wrapper that is switched off, in the place of a new one.
                layer.on[:] = [True]
                return layer
        return Layer(*site, around)


def _state(layer: Layer, target: Target) -> tuple[WrapperState, str]:
    if live.site(target) != (layer.owner, layer.name):
        return WrapperState.REPLACED, "gone: its module was imported again"
    if (above := layer.above()) is None:
        value = live.origin(live.raw(layer.owner, layer.name))
        return WrapperState.REPLACED, f"replaced by {value}, or wrapped without functools.wraps"
    if foreign := next((value for value in above if not live.layer_of(value)), None):
        return WrapperState.WRAPPED_OVER, f"wrapped over by {live.origin(foreign)}"
    return WrapperState.ON_TOP, ""
