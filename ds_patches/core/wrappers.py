"""The two kinds of wrapper. Each has a switch, for the day it cannot be removed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ds_patches.core import live
from ds_patches.core.patch import Kind, Target

Around = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
#: Tells a wrapper's body what lies beneath it and whether it is switched on.
Turn = Callable[[Any, bool], None]

_CARRIERS = (classmethod, staticmethod)


@dataclass(eq=False)
class Wrapper:
    """One wrapper of ours at one place.

    original: what the owner's `__dict__` held before, unbound, or MISSING. Kept once.
    installed: what the owner's `__dict__` holds instead.
    body: the object a call runs through; `installed` itself, or what it carries.
    on: switched off, the wrapper passes every call straight through.
    """

    target: Target
    owner: live.Owner
    name: str
    original: Any
    installed: Any
    body: Any
    turn: Turn
    on: bool = True

    def switch(self, on: bool) -> None:
        """Take effect, or pass every call straight through."""
        self.on = on
        self.turn(_beneath(self.owner, self.name, self.original), on)

    def rest_on(self, original: Any) -> None:
        """Let another original lie beneath, when the wrapper that lay there is taken out."""
        self.original = original
        self.switch(self.on)


def build(target: Target, owner: live.Owner, name: str, original: Any, around: Around) -> Wrapper:
    """Return the wrapper, not yet in place. Raises TypeError for what is not a function."""
    beneath = _beneath(owner, name, original)
    if isinstance(original, (type, property)) or not callable(_carried(beneath)):
        raise TypeError(f"{target.key} is a {type(original).__name__}, only functions are wrapped")
    if target.kind is Kind.WRAPT:
        body, turn = _proxy(beneath, around)
        return Wrapper(target, owner, name, original, body, body, turn)
    carrier = _carrier(original)
    body, turn = _closure(beneath, around, isinstance(owner, ModuleType), carrier)
    if original is live.MISSING:
        body.__name__, body.__qualname__, body.__module__ = name, target.qualname, target.module
        body.__doc__ = around.__doc__
    return Wrapper(target, owner, name, original, carrier(body) if carrier else body, body, turn)


def _beneath(owner: live.Owner, name: str, original: Any) -> Any:
    return live.Absent(owner, name) if original is live.MISSING else original


def _carrier(raw: Any) -> Any:
    # isinstance, because a wrapt proxy of a classmethod has to be treated as one.
    return next((carrier for carrier in _CARRIERS if isinstance(raw, carrier)), None)


def _carried(beneath: Any) -> Any:
    """Return the function that a classmethod or staticmethod carries; a proxy stays whole."""
    return beneath.__func__ if type(beneath) in _CARRIERS else beneath


def _proxy(beneath: Any, around: Around) -> tuple[Any, Turn]:
    import wrapt  # costs 0.1 s, so not before it is needed

    on = True

    def turn(now_beneath: Any, now_on: bool) -> None:
        nonlocal on
        on = now_on
        proxy.__wrapped__ = now_beneath

    proxy = wrapt.FunctionWrapper(beneath, around, enabled=lambda: on)
    return proxy, turn


def _closure(beneath: Any, around: Around, of_module: bool, carrier: Any) -> tuple[Any, Turn]:
    """Return a plain function around the original: Dynamo inlines it, wrapt's proxies it skips.

    All it needs lies in its own cells, because Dynamo follows cells where it follows no object.
    """
    function, on = _carried(beneath), True
    is_proxy = function is beneath

    def of_instance(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = function.__get__(self)
        return around(call, self, args, kwargs) if on else call(*args, **kwargs)

    def of_class(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        call = function.__get__(None, cls) if is_proxy else function.__get__(cls)
        return around(call, cls, args, kwargs) if on else call(*args, **kwargs)

    def of_nothing(*args: Any, **kwargs: Any) -> Any:
        return around(function, None, args, kwargs) if on else function(*args, **kwargs)

    def turn(now_beneath: Any, now_on: bool) -> None:
        nonlocal function, is_proxy, on
        function, on = _carried(now_beneath), now_on
        is_proxy = function is now_beneath
        body.__wrapped__ = function

    free = of_module or carrier is staticmethod
    chosen = of_nothing if free else of_class if carrier is classmethod else of_instance
    body: Any = functools.wraps(function)(chosen)
    return body, turn
