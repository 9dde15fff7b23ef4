"""What wrappers are called with, and attributes that read otherwise for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

from ds_patches.core import live

#: Of a wrapper's signature: what it wraps, and what that is called with.
Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: A wrapper's function, by wrapt's signature: the second is the instance.
Around = Callable[[Wrapped, Any, Args, Kwargs], Any]

#: Of a function with ``*args`` or ``**kwargs``: another library's, by which nothing can be named.
_TAKES_ANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def in_order(wrapped: Wrapped, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments of a call in the order of the function that lies beneath all wrappers.

    Its defaults stand in for what is not given, up to the last that is. What `wrapped` takes beside
    them it has already: see `wrappers`. Raises TypeError where the arguments do not fit.
    """
    if type(wrapped) is partial:
        wrapped = wrapped.func
    found = live.innermost(getattr(wrapped, "__func__", wrapped))
    if found.__code__.co_flags & _TAKES_ANY:
        return (*args, *kwargs.values())
    function = getattr(found, "__func__", found)
    names, defaults, required = _parameters(function)
    bound = hasattr(wrapped, "__self__") or found is not function
    names, required = names[bound:], required - bound
    if not kwargs and required <= len(args) <= len(names):
        return args
    given = dict(zip(names, args, strict=False))
    if len(args) <= len(names) and kwargs.keys() <= {*names} - given.keys():
        given |= kwargs
        last = max((at for at, name in enumerate(names) if name in given), default=0)
        values = defaults | given
        if values.keys() >= {*names}:
            return tuple(values[name] for name in names[: last + 1])
    try:
        inspect.signature(function).bind(*[None] * bound, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}() {error}") from None
    return args


def names_of(function: Any) -> tuple[str, ...]:
    """Return the arguments of a function that is beneath all wrappers."""
    return _parameters(getattr(function, "__func__", function))[0]


@cache
def _parameters(function: FunctionType) -> tuple[tuple[str, ...], Kwargs, int]:
    """Names, and values of those that have one; how many have none."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    required = len(names) - len(values)
    return names, dict(zip(names[required:], values, strict=True)), required


@contextmanager
def meanwhile(thing: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `thing`, and put back what they were."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
