"""What lies over a wrapped function after any ordering of events, told without looking."""

from __future__ import annotations

from ds_patches.core.state import WrapperState


class Model:
    """What lies over one target's original, bottom first: "ours", the core's "watch", "second".

    watched: the core wraps the same function while any patch is applied.
    """

    def __init__(self, exists: bool, watched: bool = False) -> None:
        self.exists = exists
        self.parts = ["ours", "watch"] if watched else ["ours"]
        self.layers: list[str] = []
        self.on = False

    def apply(self) -> None:
        self.on = True
        self.layers += [part for part in self.parts if part not in self.layers]

    def refuse(self) -> None:
        """The hook found nothing to apply: the core wraps its own, as other ranks may have it."""
        self.layers += [part for part in self.parts if part == "watch"]

    def unapply(self) -> None:
        for part in self.parts if self.on else {"watch"} & {*self.layers}:
            if self._above(part)[:1] in ([], ["watch"]):
                self.layers.remove(part)
        self.on = False

    def wrap(self, style: str) -> None:
        if self.exists or self.layers:
            self.layers = [*(self.layers if style != "P" else []), "second"]

    @property
    def state(self) -> WrapperState:
        if "ours" not in self.layers:
            return WrapperState.REPLACED
        return WrapperState.WRAPPED_OVER if "second" in self._above("ours") else WrapperState.ON_TOP

    def _above(self, part: str) -> list[str]:
        if part not in self.layers:
            return ["nothing: it is gone"]
        return self.layers[self.layers.index(part) + 1 :]
