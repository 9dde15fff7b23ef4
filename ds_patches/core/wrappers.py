"""wrapt's wrapper around a function of DeepSpeed, changed so that compiled code calls it.

Where Dynamo traces a call of wrapt's own wrapper, it silently calls the original, or fails. Marked
as `torch.compiler.disable` marks a function, the wrapper is a graph break and runs eagerly (torch
2.6 to 2.15). What Dynamo and libraries need besides is in `_Bound.__func__` and `Method`.
"""

import copy
from types import ModuleType
from typing import Any

import wrapt


class _Bound(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A wrapper bound to an instance."""

    _torchdynamo_disable = True
    _torchdynamo_disable_msg = None

    @property
    def _self_layer(self) -> Any:
        return self._self_parent._self_layer

    @property
    def __func__(self) -> Any:
        # wrapt returns the original's: a `with` block in compiled code, and PyTorch's learning rate
        # schedulers at the step of an optimizer, would call past the wrapper.
        return self._self_parent

    # Copied and pickled as a bound method is: a deep copy is bound to the copy of the instance.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self._self_parent.__get__(copy.deepcopy(self.__self__, memo), None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.__self__, self.__name__)


class Function(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper around a function of a module, or around a method of one object."""

    __bound_function_wrapper__ = _Bound
    _torchdynamo_disable = True
    _torchdynamo_disable_msg = None
    _self_layer = None  # not annotated: `__annotations__` are those of the function

    # Copied and pickled as a function is: a copy is the same object, a pickle is its name.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        layer: Any = self._self_layer
        if isinstance(layer.owner, (type, ModuleType)):
            return self
        # The copy of an object has its own method, without this wrapper.
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # After removal, the name is that of the function, whose copy is the same object.
        return self.__qualname__ if self._self_enabled else (copy.copy, (self.__wrapped__,))


class Method(Function):
    """A wrapper around a method of a class. `Class.method` is the wrapper itself."""

    def __init__(self, wrapped: Any, wrapper: Any, **options: Any) -> None:
        super().__init__(wrapped, wrapper, **options)
        # Stored, since Dynamo cannot trace super() in the two methods below.
        self._self_bind: Any = super().__get__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._self_bind(instance, owner)

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._self_bind(instance, None)(*args, **kwargs)
