"""What a module of the engine gets: hooks around its calls, and a place for its parameters."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ds_patches.upstream import deepcompile, zero3

from . import dynamo
from .uses import Uses

#: What a parameter is to be seen as; raw in frames that are being compiled.
See = Callable[[torch.nn.Parameter], torch.Tensor]


def call_hooks(engine: Any, uses: Uses) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks before and after each call of a module that eager code makes."""
    root, begin = engine.module, dynamo.disabled(uses.calls.open)
    end = dynamo.disabled(lambda module: uses.close(uses.calls.close(module)))
    compiles_within = deepcompile.guards_layer_parameters()
    leaves = set(deepcompile.leaf_modules(engine))

    def before_call(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = begin(module)
        # Ranks compile together, and what runs in a leaf differs by rank.
        if module in leaves or not (compiles_within or module is root):
            call.dynamo = dynamo.switch()

    def after_call(module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for call in reversed(end(module)):
            if call.dynamo is not None:
                dynamo.switch(call.dynamo)

    for function in (before_call, after_call, dynamo.switch):
        dynamo.leave_alone(function)
    return before_call, after_call


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
    stock: Any = zero3.parameter_dict_class()

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
