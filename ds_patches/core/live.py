"""Live objects: the owner of a place, its chain of wrappers, and the origin of a value."""

import functools
import sys
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from ds_patches.core.patch import Place

Owner = type | ModuleType

#: Stands for "no such name in the owner's `__dict__`".
MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING"})()

CARRIERS = (classmethod, staticmethod)
_NVTX = "instrument_w_nvtx.<locals>.wrapped_fn"
#: Longest chain of wrappers: an object that has every attribute has an endless one.
_CHAIN_LIMIT = 64


def site(place: Place) -> tuple[Owner, str] | None:
    """Return the owner of a place, a module or class, and the attribute; None if it has none."""
    *path, last = place.qualname.split(".")
    owner: Any = sys.modules.get(place.module)
    if owner is None:
        return None
    for part in path:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            return None
    if isinstance(owner, type) and last.startswith("__") and not last.endswith("__"):
        last = f"_{owner.__name__.lstrip('_')}{last}"  # as the compiler mangles private names
    return owner, last


def raw(owner: Owner, name: str) -> Any:
    """Return a value from the owner's own `__dict__`, unbound; MISSING if it has none."""
    return vars(owner).get(name, MISSING)


def chain(value: Any) -> list[Any]:
    """Return a value and all that it wraps, outermost first, by `__wrapped__`.

    Unlike wrapt's `wrapper_chain`, knows DeepSpeed's NVTX decorator, which sets no `__wrapped__`.
    """
    layers = [value]
    # type(), not isinstance: a wrapt proxy claims the class of what it wraps.
    while not issubclass(type(value), type) and len(layers) < _CHAIN_LIMIT:
        beneath = getattr(value, "__wrapped__", None)
        if beneath is None and type(value) is FunctionType and value.__qualname__ == _NVTX:
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            beneath = cells["func"].cell_contents
        if beneath is None:
            break
        layers.append(value := beneath)
    return layers


def innermost(value: Any) -> Any:
    """Return the function or class beneath all wrappers that have `__wrapped__`."""
    return chain(value)[-1]


def layer_of(value: Any) -> Any:
    """Return the `Layer` of a wrapper of ours; None for any other value."""
    # By the type: another library's wrapper around ours has our attribute through its proxy.
    return value._self_layer if hasattr(type(value), "_self_layer") else None


def origin(value: Any) -> str:
    """Return where a live value comes from: the module and line of the code that runs first."""
    if value is MISSING:
        return "nowhere (the name is gone)"
    while True:
        kind = type(value)
        if issubclass(kind, functools.partial):
            value = value.func
        elif issubclass(kind, (*CARRIERS, MethodType)):
            value = value.__func__
        elif hasattr(kind, "_self_wrapper"):  # wrapt's: the wrapper runs, not what it wraps
            value = value._self_wrapper
        else:
            break
    if kind is FunctionType:
        code = value.__code__
        # Not `__module__`: functools.wraps copies it from the wrapped function.
        module = value.__globals__.get("__name__", "?")
        return f"{module} ({code.co_filename}:{code.co_firstlineno})"
    named = value if issubclass(kind, type) else kind
    return f"{named.__module__}.{named.__qualname__}"
