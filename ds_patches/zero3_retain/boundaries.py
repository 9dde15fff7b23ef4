"""Gather a module before its backward and release it after, in every backward anew.

Stock ZeRO-3 counts how often a module's parameters will be needed while the *forward* runs, and
the first backward spends the counts. Here the counts belong to the graph task: each run of the
autograd engine opens the calls it passes through and closes them when their inputs' gradients
are done, so the second run over one graph gathers and releases just as the first did.

Plain PyTorch: gather and release are two callables, nothing here knows of DeepSpeed. The idea of
a pair of identity functions around a module is FSDP2's (``fully_shard``) as much as DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any

import torch

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import NO_TASK, current_task_id, recomputes_for_hooks


class _Call:
    """One forward call of a module: how many of its inputs lead a gradient on.

    made_in: the graph task that recomputes it, or none.
    version: of the parameters, as `ModuleBoundary` is told.
    """

    __slots__ = ("inputs", "made_in", "remaining", "sealed", "task_id", "version")

    def __init__(self, made_in: int, version: int) -> None:
        self.made_in, self.version = made_in, version
        self.inputs = 0
        self.sealed = False  # an output was seen: the next input begins another call
        self.task_id: int | None = None  # the graph task in which the call is open
        self.remaining = 0


class OpenCalls:
    """The module calls that are open in the running graph tasks of one model.

    `on_task_begin` runs at the first gather of a graph task, inside it, so that the owner can
    queue the :meth:`end` of that task: calls whose inputs need no gradient (a first layer), or
    whose loss reaches only some of them, are closed there and nowhere else.
    """

    def __init__(self, on_task_begin: Callable[[int], None]) -> None:
        self._on_task_begin = on_task_begin
        #: A forward with a graph has run since the owner set it back, by the engine or past it. The
        #: first may have run before we came.
        self.forward_ran = True
        #: The owner was taken back, and graphs have edges of ours: one backward each, as on stock.
        self.taken_back = False
        self._deferred: list[Callable[[], None]] = []
        self._open: dict[int, dict[_Call, ModuleBoundary]] = {}
        # Autograd runs hooks of CPU and device nodes on different threads.
        self._lock = Lock()

    def defer(self, release: Callable[[], None]) -> None:
        """Run it when a backward comes to the next edge of a module, or ends."""
        with self._lock:
            self._deferred.append(release)

    def _run_deferred(self) -> None:
        with self._lock:
            releases, self._deferred = self._deferred, []
        for release in releases:
            release()

    def open(self, call: _Call, boundary: ModuleBoundary) -> None:
        if self._deferred:
            self._run_deferred()
        task_id = current_task_id()
        with self._lock:
            calls = self._open.get(task_id)
            begins = calls is None
            if calls is None:
                calls = self._open[task_id] = {}
            if call not in calls:
                calls[call] = boundary
                boundary.open_calls += 1
                # A call seen again in the same task (an output that no input depends on) stays
                # open until the task ends.
                call.remaining = call.inputs if call.task_id != task_id else 0
                call.task_id = task_id
        if begins:
            self._on_task_begin(task_id)

    def close(self, call: _Call, boundary: ModuleBoundary) -> None:
        if self._deferred:
            self._run_deferred()
        with self._lock:
            calls = self._open.get(current_task_id(), {})
            last = calls.pop(call, None) is not None and boundary.leave()
        if last:
            boundary.release()

    def end(self, task_id: int) -> None:
        """Close what `task_id` left open, in the order it was opened."""
        self._run_deferred()
        with self._lock:
            calls = self._open.pop(task_id, {})
            last = [boundary for boundary in calls.values() if boundary.leave()]
        for boundary in last:
            boundary.release()

    def abandon(self) -> None:
        """Forget every open call without releasing: a backward raised, the owner cleans up."""
        with self._lock:
            self._deferred = []
            for calls in self._open.values():
                for boundary in calls.values():
                    boundary.open_calls = 0
            self._open.clear()

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._open.values())


class ModuleBoundary:
    """Both edges of one module: `gather` before its backward, `release` after it.

    `release` runs when the module's last open call closes, so two interleaved calls of one module
    (a shared layer on parallel branches) never lose their parameters to each other.

    :attr:`before` and :attr:`after` are for the module's outputs and inputs.

    version: of the parameters: a backward after it has moved on is Refused.
    transforms: whether those of ``torch.func`` may pass. PyTorch then inspects the Function's
    signature at every call, which takes the host twice as long as all the rest.
    """

    def __init__(
        self,
        gather: Callable[[], None],
        release: Callable[[], None],
        calls: OpenCalls,
        version: Callable[[], int] = lambda: 0,
        transforms: bool = True,
    ) -> None:
        self.gather = gather
        self.release = release
        self.version = version
        self.open_calls = 0
        self._calls = calls
        self._call = _Call(NO_TASK, version())
        self.before = Edge(self._output_of_call, self._before_backward, transforms)
        self.after = Edge(self._input_of_call, self._after_backward, transforms)

    def leave(self) -> bool:
        """One call fewer; True when it was the last."""
        self.open_calls -= 1
        return self.open_calls == 0

    def _input_of_call(self, value: torch.Tensor) -> _Call:
        # Recomputation stops in the midst of a call, whose outputs are never seen.
        task_id, version = current_task_id(), self.version()
        call = self._call
        if call.sealed or call.made_in != task_id or call.version != version:
            call = self._call = _Call(task_id, version)
        call.inputs += value.requires_grad
        return call

    def _output_of_call(self, value: torch.Tensor) -> _Call:
        # A call begins with an output where all arguments have names: upstream sees none of them.
        if self._call.version != self.version():
            self._call = _Call(current_task_id(), self.version())
        self._call.sealed = True
        if value.requires_grad and not self._calls.forward_ran:
            self._calls.forward_ran = current_task_id() == NO_TASK
        if self.open_calls and current_task_id() != NO_TASK and recomputes_for_hooks():
            # Recomputed to its end in the midst of its backward: upstream has just released it.
            self.gather()
        return self._call

    def _before_backward(self, call: _Call, grad: Any) -> Any:
        if call.version != self.version():
            raise Refused(
                "backward over a forward from before engine.step(): its activations belong to the "
                "old parameters, and the old parameters are gone. Run the forward again."
            )
        if self._calls.taken_back and call.task_id not in (None, current_task_id()):
            raise Refused(
                "a second backward over a forward of ZeRO-3, after zero3_retain was taken back"
            )
        self._calls.open(call, self)
        # Once per output, as stock does: the order of fetches is what its prefetch trace learns.
        self.gather()
        # A graph of this backward begins here, and has a backward of its own that ends here.
        function: Any = self.after if torch.is_grad_enabled() else NoBoundary
        return function.apply(grad)

    def _after_backward(self, call: _Call, grad: Any) -> Any:
        function: Any = self.before if torch.is_grad_enabled() else NoBoundary
        grad = function.apply(grad)
        if call.task_id == current_task_id():  # else no output took part: nothing was gathered
            call.remaining -= 1
            if call.remaining == 0:
                self._calls.close(call, self)
        return grad


class NoBoundary:
    """In place of both edges where there is nothing to gather: no node, no bookkeeping."""

    @staticmethod
    def apply(value: torch.Tensor) -> torch.Tensor:
        return value


class Edge:
    """Stands where upstream has an autograd Function of its own for each module.

    As that, which is a class, it is the same in a copy of the module.

    call_of: returns the call of the module that a tensor belongs to, in its forward.
    run_backward: gets that call and the gradient, and returns the gradient.
    """

    __slots__ = ("apply", "call_of", "run_backward")

    def __init__(
        self,
        call_of: Callable[[torch.Tensor], _Call],
        run_backward: Callable[[_Call, Any], Any],
        transforms: bool,
    ) -> None:
        self.call_of, self.run_backward = call_of, run_backward
        #: Takes a tensor, and returns it with the edge in its graph. No function of ours, which
        #: Dynamo would compile by itself.
        self.apply = partial((_TransformedBoundary if transforms else _Boundary).apply, self)

    def __deepcopy__(self, memo: Any) -> Edge:
        return self


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Edge, value: torch.Tensor) -> torch.Tensor:
        ctx.edge, ctx.call = edge, edge.call_of(value)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, ctx.edge.run_backward(ctx.call, grad)


class _TransformedBoundary(_Boundary):
    @staticmethod
    def forward(edge: Edge, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        edge, value = inputs
        ctx.edge, ctx.call = edge, edge.call_of(value)


# PyTorch asks for it at every call of such a Function, and would make it anew.
_TransformedBoundary.forward.__signature__ = signature(  # type: ignore[attr-defined]
    _TransformedBoundary.forward
)


def is_boundary(node: Any) -> bool:
    """Whether a node of a graph is an edge of a module."""
    return type(node).__name__ in _NODES


#: PyTorch calls the node of a Function after it.
_NODES = {f"{one.__name__}Backward" for one in (_Boundary, _TransformedBoundary)}
