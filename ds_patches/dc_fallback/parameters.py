"""The place where a module keeps its parameters, as ZeRO-3 replaces it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ds_patches.upstream import zero3

from . import dynamo

#: What a parameter is to be seen as; raw in frames that are being compiled.
See = Callable[[torch.nn.Parameter], torch.Tensor]


def watch(module: torch.nn.Module, see: See) -> Callable[[], None]:
    """Show parameters of `module` through `see`; return what undoes that."""
    before = module._parameters
    watched = _watched()(module, see)
    for name, param in before.items():
        OrderedDict.__setitem__(watched, name, param)
    module._parameters = watched
    return functools.partial(_put_back, module, before)


def _put_back(module: torch.nn.Module, before: Any) -> None:
    """The container that was there, with what the module holds now."""
    now = dict(module._parameters.items())
    before.clear()
    before.update(now)
    module._parameters = before


@functools.cache
def _watched() -> type:
    stock: Any = zero3.parameters_class()

    class WatchedParameters(stock):  # type: ignore[misc]
        """Parameters of one module; a copy of it is an ordinary one."""

        def __init__(self, parent_module: torch.nn.Module, see: See) -> None:
            super().__init__(parent_module)
            self._see = see

        def __getitem__(self, key: str) -> Any:
            param = super(stock, self).__getitem__(key)
            if torch.compiler.is_compiling():
                return param  # a graph gathers by itself
            return self._see(param)

        def __reduce__(self) -> Any:
            parent = zero3.module_of(self)
            return stock, (parent,), None, None, iter(list(self.items()))

    dynamo.leave_alone(WatchedParameters.__getitem__)
    return WatchedParameters
