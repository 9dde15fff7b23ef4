"""The wrapper around a function of DeepSpeed: wrapt's, which compiled code calls as well.

Where Dynamo traces a call of wrapt's own, it calls the original, without a word, or fails. Marked
as `torch.compiler.disable` marks a function, a wrapper is a graph break and runs as it does eagerly
(torch 2.6 to 2.15). In three places Dynamo, and libraries, need what a function has and wrapt's
wrapper has not: see `_Bound.__func__`, and `Method`.
"""

from __future__ import annotations

import copy
from functools import partial, wraps
from typing import Any

import wrapt

from ds_patches.core import live
from ds_patches.core.calls import Around, names_of


class _Bound(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A wrapper as an instance has it."""

    _torchdynamo_disable = True
    _torchdynamo_disable_msg = None

    @property
    def __func__(self) -> Any:
        # wrapt's is the original's: a `with` block in compiled code, and PyTorch's learning rate
        # schedulers at the step of an optimizer, would go past the wrapper.
        return self._self_parent

    # As a method of Python's does: copied it is the same, with a copy of its object another's.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self._self_parent.__get__(copy.deepcopy(self.__self__, memo), None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.__self__, self.__name__)


class Function(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Around a function of a module, or a method at one object."""

    __bound_function_wrapper__ = _Bound
    _torchdynamo_disable = True
    _torchdynamo_disable_msg = None
    _self_layer = None

    def __init__(self, wrapped: Any, around: Around, **how: Any) -> None:
        super().__init__(wrapped, _passing_on(wrapped, around), **how)

    # As a function of Python's does: a copy is itself, and pickled it is its name.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Taken out, the name is that of the function: a copy of that is itself.
        return self.__qualname__ if self._self_enabled else (copy.copy, (self.__wrapped__,))


class Method(Function):
    """Around a method, bound as a function is: `Class.method` is the wrapper itself, every time."""

    def __init__(self, wrapped: Any, around: Around, **how: Any) -> None:
        super().__init__(wrapped, around, **how)
        # Kept, as Dynamo fails to follow super() where it traces the two below.
        self._self_bind: Any = super().__get__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._self_bind(instance, owner)

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._self_bind(instance, None)(*args, **kwargs)


def _passing_on(beneath: Any, around: Around) -> Around:
    """Let keywords that only another library's wrapper beneath knows go there past `around`."""
    layers: list[Any] = []
    function = live.innermost(beneath, layers)
    if not any(live.is_anothers(getattr(layer, "__func__", layer)) for layer in layers):
        return around
    known = names_of(function)

    @wraps(around)
    def passing_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if others := {name: kwargs[name] for name in kwargs.keys() - {*known}}:
            wrapped = partial(wrapped, **others)
            kwargs = {name: one for name, one in kwargs.items() if name not in others}
        return around(wrapped, instance, args, kwargs)

    return passing_on
