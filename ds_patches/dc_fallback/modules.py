"""The hooks around a module's calls, and the dict through which its parameters are read."""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ds_patches.upstream import deepcompile
from ds_patches.upstream.classes import OFFLOAD
from ds_patches.upstream.zero3_gathers import is_leaf

from . import dynamo
from .uses import Uses

#: Returns the tensor that eager code gets for a parameter; not called while a frame is compiled.
ReadParam = Callable[[torch.nn.Parameter], torch.Tensor]


def call_hooks(engine: Any, uses: Uses) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks to run before and after each call of a module by eager code."""
    root, open_call = engine.module, dynamo.disabled(uses.calls.open)
    close_call = dynamo.disabled(lambda module: uses.close(uses.calls.close(module)))
    compiles_submodules = deepcompile.guards_layer_parameters()
    leaves = {*filter(is_leaf, root.modules())}

    def before_call(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = open_call(module)
        # Ranks compile together, but may run different parts of a leaf module.
        if module in leaves or not (compiles_submodules or module is root):
            call.dynamo_callback = dynamo.set_callback()

    def after_call(module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for call in reversed(close_call(module)):
            if call.dynamo_callback is not None:
                dynamo.set_callback(call.dynamo_callback)

    for function in (before_call, after_call, dynamo.set_callback):
        dynamo.skip_function(function)
    return before_call, after_call


def watch(module: torch.nn.Module, read: ReadParam) -> Callable[[], None]:
    """Make reads of `module`'s parameters return `read(param)`; return a function to undo it."""
    original = module._parameters
    watched = _watched_class()(module, read)
    for name, param in original.items():
        OrderedDict.__setitem__(watched, name, param)
    module._parameters = watched

    def put_back() -> None:
        """Restore the module's own dict, with the parameters that the module has now."""
        current = dict(module._parameters.items())
        original.clear()
        original.update(current)
        module._parameters = original

    return put_back


@functools.cache
def _watched_class() -> type:
    stock: Any = sys.modules[OFFLOAD.module].ZeROOrderedDict

    class WatchedParameters(stock):  # type: ignore[misc]
        """The parameters of one module, through `read`; a copy is an ordinary dict."""

        def __init__(self, parent_module: torch.nn.Module, read: ReadParam) -> None:
            super().__init__(parent_module)
            self._watched_module, self._read = parent_module, read

        def __getitem__(self, key: str) -> Any:
            param = super(stock, self).__getitem__(key)
            if torch.compiler.is_compiling():
                return param  # the compiled graph gathers it
            return self._read(param)

        def __reduce__(self) -> Any:
            return stock, (self._watched_module,), None, None, iter(list(self.items()))

    dynamo.skip_function(WatchedParameters.__getitem__)
    return WatchedParameters
