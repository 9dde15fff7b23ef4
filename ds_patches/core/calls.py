"""The arguments of a wrapped call, and attributes that are set for the length of a block."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

from ds_patches.core import live

#: The types of a wrapper's parameters: the wrapped function, and the arguments of the call.
Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: A wrapper, by wrapt's signature; the second parameter is the instance.
Around = Callable[[Wrapped, Any, Args, Kwargs], Any]

#: Code flags of a function with ``*args`` or ``**kwargs``, as other libraries' wrappers have.
_TAKES_ANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def in_order(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments of a call as positional ones, by the signature beneath all wrappers.

    Defaults stand for arguments that are not given, up to the last one that is. Raises TypeError if
    the arguments do not fit, or if one can only be given by name.
    """
    original = live.innermost(getattr(wrapped, "__func__", wrapped))
    if original.__code__.co_flags & _TAKES_ANY:
        return (*args, *kwargs.values())
    function = getattr(original, "__func__", original)
    names, defaults, required = _parameters(function)
    bound = hasattr(wrapped, "__self__") or original is not function
    names, required = names[bound:], required - bound
    if not kwargs and required <= len(args) <= len(names):
        return args
    values = dict(zip(names, args, strict=False))
    if len(args) <= len(names) and kwargs.keys() <= {*names} - values.keys():
        values |= kwargs
        last = max((index for index, name in enumerate(names) if name in values), default=0)
        values = defaults | values
        if values.keys() >= {*names}:
            return tuple(map(values.__getitem__, names[: last + 1]))
    try:
        inspect.signature(function).bind(*[None] * bound, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}() {error}") from None
    raise TypeError(f"{function.__qualname__}() takes some of {', '.join(kwargs)} only by name")


@cache
def _parameters(function: FunctionType) -> tuple[tuple[str, ...], Kwargs, int]:
    """Return the names of the parameters, the defaults by name, and how many have no default."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    required = len(names) - len(values)
    return names, dict(zip(names[required:], values, strict=True)), required


@contextmanager
def meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the length of a block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
