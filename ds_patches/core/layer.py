"""A wrapper around one function: installs it, finds it in a chain of wrappers, removes it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Around


class Layer:
    """A wrapper around one function, installed from its construction until `remove`.

    After that, the wrapper passes each call straight through to the function.

    owner, name: a module or class, and its function; or any object and its method, to wrap the
        calls of this object alone.
    around: called in place of the function, with the bound function, the instance or None, the
        positional and the named arguments.
    namespace: the owner's `__dict__`. original: its value before, or MISSING.
    installed: wrapt's wrapper.
    on: the wrapper is in effect while this list is not empty; wrapt reads it in C.

    Raises TypeError for a classmethod or staticmethod, since Dynamo calls past their wrappers.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        from ds_patches.core.wrappers import Function, Method  # wrapt: only when needed

        self.owner, self.name, self.namespace, self.around = owner, name, vars(owner), around
        self.original = self.namespace.get(name, live.MISSING)
        beneath = getattr(owner, name) if self.original is live.MISSING else self.original
        if isinstance(self.original, (type, *live.CARRIERS)) or not callable(beneath):
            raise TypeError(
                f"{owner.__name__}.{name} is a {type(beneath).__name__}; only functions of a "
                "module and methods of instances are wrapped"
            )
        self.on = [True]
        kind: Any = Method if isinstance(owner, type) else Function
        self.installed = kind(beneath, around, enabled=self.on)
        self.installed._self_layer = self
        self._put(self.installed)

    def above(self) -> list[Any] | None:
        """Return the wrappers over this one, outermost first; None if it is not in the chain."""
        chain = live.chain(self.namespace.get(self.name, live.MISSING))
        return next((chain[:i] for i, layer in enumerate(chain) if layer is self.installed), None)

    def remove(self) -> None:
        """Switch the wrapper off, and remove it unless it lies beneath another library's."""
        self.on.clear()  # also for callers that hold it
        if (above := self.above()) is None:
            return
        if not above:
            original = self.original
            while (layer := live.layer_of(original)) and not layer.on:
                original = (
                    layer.original
                )  # a layer that was removed while another library's wrapper lay over this one
            self._put(original)
        elif upper := live.layer_of(above[-1]):
            upper.original = self.original
            upper.installed.__wrapped__ = self.installed.__wrapped__

    def _put(self, value: Any) -> None:
        kind: Any = type if isinstance(self.owner, type) else object
        if value is live.MISSING:
            kind.__delattr__(self.owner, self.name)
        else:
            kind.__setattr__(self.owner, self.name, value)


@contextmanager
def layered(owner: Any, **arounds: Around) -> Iterator[None]:
    """Wrap methods of `owner`, by their names, for the length of a block."""
    with ExitStack() as layers:
        for name, around in arounds.items():
            layers.callback(Layer(owner, name, around).remove)
        yield
