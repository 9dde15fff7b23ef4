"""TorchDynamo's private functions, in one place.

When Dynamo skips a frame, it still looks at every function that the frame calls. A function that
asks if it is being compiled would be compiled by itself, and be told yes. That is how the fallback
of DeepSpeed 0.19.3 to 0.19.8 fails in a loop with a graph break: its getter is a compiled frame
that gathers nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core.errors import NotCovered
from ds_patches.steps import graph_task


def skip_function(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling `function` by itself; frames that call it still trace it.

    Dynamo looks at the functions that it calls: these have to be `disabled`.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def unskip_function(function: Callable[..., Any]) -> None:
    """Undo `skip_function`."""
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(function.__code__)


def disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, run without Dynamo with all that it calls. Not for traced functions."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def find_backend(name_or_backend: Any) -> Callable[..., Any]:
    """Return the backend of this name, or the callable itself, that compiles for PyTorch alone."""
    from torch._dynamo.backends.registry import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name_or_backend)
    return backend


def set_callback(callback: Any = None) -> Any:
    """Set Dynamo's callback of this thread, None to compile nothing; return the previous one.

    Only for functions passed to `skip_function`: at the end of a compiled or a `disabled` function,
    Dynamo restores the callback of its beginning.
    """
    from torch._C._dynamo.eval_frame import set_eval_frame

    return set_eval_frame(callback)


class SavedTensorsHooks:
    """``torch.autograd.graph.saved_tensors_hooks`` for eager code alone.

    A compiled graph must get the very objects back that it has saved: hooks replace a parameter by
    a tensor without its attributes, which DeepCompile reads.
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
        """Run a compiled graph without these hooks, if they are the innermost ones.

        Raises NotCovered with torch 2.7 and older, which do not tell which hooks are in place.
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
    """Return True while Dynamo compiles a frame, and reads parameters to build its guards."""
    from torch._guards import CompileContext

    return CompileContext.try_get() is not None
