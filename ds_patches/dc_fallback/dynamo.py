"""What is private in TorchDynamo, in one place.

A frame that Dynamo skips still has it look at every function that the frame calls. A function that
asks whether it is being compiled would so be compiled by itself, and be told yes: that is how the
fallback of DeepSpeed 0.19.3 to 0.19.8 fails in a loop with a graph break, where its getter is a
compiled frame that gathers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core.errors import NotCovered
from ds_patches.steps import graph_task


def leave_alone(function: Callable[..., Any]) -> None:
    """Have Dynamo never compile `function` by itself; compiled frames that call it still trace it.

    Functions that it calls are looked at again: they want `disabled`.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def look_again(function: Callable[..., Any]) -> None:
    """Take `leave_alone` back."""
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(function.__code__)


def disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run without Dynamo, and all that it calls. Not for what compiled frames trace."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def backend(wanted: Any) -> Callable[..., Any]:
    """What compiles a graph for PyTorch alone, by its name or as it is."""
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(wanted)
    return found


def switch(callback: Any = None) -> Any:
    """From here on nothing is compiled on this thread; return what `switch` takes to go back.

    For functions that were left alone: at the end of a compiled or a `disabled` one, Dynamo is what
    it was at its beginning.
    """
    from torch._C._dynamo.eval_frame import set_eval_frame

    return set_eval_frame(callback)


class SavedTensorsHooks:
    """``torch.autograd.graph.saved_tensors_hooks`` for eager code alone.

    What a compiled graph saves must come back as the object that it was: of a parameter, hooks give
    back a tensor without its attributes, and DeepCompile asks for those.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self._hooks = pack, unpack
        self._entered = 0

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
        self._entered += 1

    def __exit__(self, *raised: Any) -> None:
        self._entered -= 1
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def run_without(self, graph: Callable[..., Any], inputs: Any) -> Any:
        """Run a compiled graph with these hooks out of its way, where they are the innermost.

        Raises NotCovered with torch 2.7 and older, which do not tell which ones are.
        """
        if not self._entered:
            return graph(*inputs)
        if (top := graph_task.top_saved_tensors_hooks) is None:
            raise NotCovered(
                "dc_fallback needs torch 2.8 or later for a compiled graph beside code that Dynamo "
                "skips"
            )
        innermost = top(True)
        if innermost is None or innermost[0] is not self._hooks[0]:
            return graph(*inputs)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            return graph(*inputs)
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)


def is_compiling_a_frame() -> bool:
    """Return True while Dynamo compiles a frame: it reads parameters, to build guards on them."""
    from torch._guards import CompileContext

    return CompileContext.try_get() is not None
