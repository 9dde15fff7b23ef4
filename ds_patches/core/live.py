"""Looking at live objects: where a place is, what lies beneath a wrapper, who put it there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from ds_patches.core.patch import Place

Owner = type | ModuleType

#: Stands for "no such name in the owner's `__dict__`".
MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING"})()

CARRIERS = (classmethod, staticmethod)
_NVTX = "instrument_w_nvtx.<locals>.wrapped_fn"
_WALK_LIMIT = 256
#: Packages whose wrappers add no keyword to those of the function beneath.
_AT_HOME = ("builtins", "contextlib", "deepspeed", "ds_patches", "functools", "torch")


class Absent:
    """What lies beneath a wrapper that added its name: calling it is asking for a missing name.

    What is added is a method without arguments; stands_for: what is there now.
    """

    __signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, owner: type, name: str, stands_for: Any) -> None:
        self.owner, self.__name__, self.__qualname__ = owner, name, f"{owner.__qualname__}.{name}"
        self.__module__, self.__doc__ = stands_for.__module__, stands_for.__doc__

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        # A base class may have what the owner has not.
        return getattr(super(self.owner, instance), self.__name__)(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        return self if instance is None else MethodType(self, instance)


def site(place: Place) -> tuple[Owner, str] | None:
    """Return the owner and the attribute's name of a place, or None if there is no owner."""
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
    """Return the value as the owner's own `__dict__` holds it, unbound, or MISSING."""
    return vars(owner).get(name, MISSING)


def ours(value: Any) -> Any:
    """Return the `Layer` that has put this there, if it is a wrapper of ours."""
    # Of another's around ours, the attribute would be ours: its type has none.
    return value._self_layer if hasattr(type(value), "_self_layer") else None


def beneath_ours(value: Any) -> Any:
    """Return what another put there, if there are wrappers of ours upon it."""
    while layer := ours(value):
        value = layer.original
    return value


def innermost(value: Any, over: list[Any] | None = None) -> Any:
    """Return the function or class beneath all wrappers that say what they wrap.

    An object that answers to every name says that it wraps something without end.

    over: takes the wrappers.
    """
    for _ in range(_WALK_LIMIT):
        kind = type(value)
        if issubclass(kind, type):
            return value
        if issubclass(kind, CARRIERS):
            beneath = value.__func__
        else:
            beneath = getattr(value, "__wrapped__", None)
            if beneath is None and kind is FunctionType and value.__qualname__ == _NVTX:
                # DeepSpeed's range decorator leaves no `__wrapped__`, only its closure. A wrapper
                # around it that copied its name has been followed above.
                beneath = _cells(value)["func"]
        if beneath is None:
            return value
        if over is not None:
            over.append(value)
        value = beneath
    return value


def path_to(top: Any, wanted: Any) -> list[Any]:
    """Return the layers from `top` down to `wanted` (by identity); empty without a way.

    Follows bound methods, partials, closures and callable objects: a second library's wrapper may
    keep what it calls in any of them. Whether it does call what its code speaks of is not known.
    """
    paths, queue = {id(top): [top]}, [top]
    for layer in queue:
        if layer is wanted:
            return paths[id(layer)]
        for beneath in _layers_beneath(layer):
            if id(beneath) not in paths and len(paths) < _WALK_LIMIT:
                paths[id(beneath)] = [*paths[id(layer)], beneath]
                queue.append(beneath)
    return []


def is_anothers(layer: Any) -> bool:
    """Whether a layer over a function is another library's, and no decorator that it came with."""
    is_function = type(layer) is FunctionType
    home = layer.__globals__.get("__name__", "") if is_function else type(layer).__module__
    return home.partition(".")[0] not in _AT_HOME


def leads_to(value: Any, wanted: Any) -> bool:
    """Whether a call of `value` may come to `wanted`."""
    return bool(path_to(value, wanted))


def calls_base(method: Any, base: Owner) -> bool:
    """Whether a method of a subclass speaks of `super()`, or of the class it would call."""
    function = innermost(method)
    code = getattr(function, "__code__", None)
    return code is None or not {"super", base.__name__}.isdisjoint(_names_in(code))


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def origin(value: Any) -> str:
    """Say where a live value comes from: module and line of the code that runs first."""
    if value is MISSING:
        return "nowhere (the name is gone)"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    function = value
    while type(function) is not FunctionType:
        if _is_functor(type(function)) and not hasattr(type(function), "__wrapped__"):
            function = type(function).__call__
            continue
        beneath = next(_layers_beneath(function), None)
        if beneath is None:
            return f"{type(function).__module__}.{type(function).__qualname__}"
        function = beneath
    code = function.__code__
    # The globals, because functools.wraps copies `__module__` from what it wraps.
    home = function.__globals__.get("__name__", "?")
    return f"{home} ({code.co_filename}:{code.co_firstlineno})"


def _layers_beneath(value: Any) -> Iterator[Any]:
    # type(), not isinstance: a wrapt proxy claims the class of what it wraps.
    kind = type(value)
    if issubclass(kind, (*CARRIERS, MethodType)):
        yield value.__func__
    elif issubclass(kind, functools.partial):
        yield value.func
    elif kind is FunctionType:
        # Its cells, which hold what its code speaks of. `__wrapped__` is only what it stands for.
        yield from (cell for cell in _cells(value).values() if _may_wrap(cell))
    else:
        for name in ("_self_wrapper", "_self_parent", "__wrapped__"):  # wrapt's proxies
            if (beneath := getattr(value, name, None)) is not None:
                yield beneath
        if hasattr(kind, "__wrapped__"):
            return  # a proxy's other attributes are those of what it wraps
        # The names that the methods of a class of callables read or write.
        methods = (m for one in kind.__mro__ for m in vars(one).values() if type(m) is FunctionType)
        spoken_of = {name for method in methods for name in method.__code__.co_names}
        own = getattr(value, "__dict__", {}) if callable(value) else {}
        yield from (v for name, v in own.items() if name in spoken_of and _may_wrap(v))


def _may_wrap(value: Any) -> bool:
    kind = type(value)
    plain = (FunctionType, MethodType, functools.partial, *CARRIERS)
    return issubclass(kind, plain) or hasattr(kind, "__wrapped__") or _is_functor(kind)


def _is_functor(kind: type) -> bool:
    """Whether these are objects that are called by code of their class in Python."""
    return any(type(vars(one).get("__call__")) is FunctionType for one in kind.__mro__)


def _cells(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
    return found
