"""Engines that DeepCompile has compiled, its graphs, and DeepSpeed's own fallback (0.19.3).

The graphs gather parameters and reduce gradients by themselves, in C++.

For each parameter, a graph overwrites the gradient partition with its first gradient, and adds the
following ones. It keeps a flag per parameter for this, and clears the flags when a backward at the
boundary ends in the graph. This loses gradients if a step has several backwards, or two graphs use
a parameter: partitions that a graph is about to overwrite have to be saved first. Once an engine's
graphs have overwritten gradients, they are told that no backward is at the boundary: a graph then
overwrites in its first backward only. Adding is slower than overwriting, so other engines keep the
flags as DeepCompile sets them.

At the end of a backward at the boundary a graph also marks the parameters that it keeps gathered
(from the sixth step on) as stale. But this end waits for the graph's gradients only: a parameter
for an output that another graph uses may be gathered later, and stays for the next step. So do
parameters that were gathered when DeepCompile chose which ones to keep, or by graphs that ran in
an evaluation only. So each step marks all parameters as stale.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_patches.core.errors import Refused
from ds_patches.upstream import zero3

_NATIVE = "_deepcompile_z3_eager_fallback"
_OWN_GRAPH = -1  # a graph that we register; DeepCompile's ids are the graphs' addresses
_NODE = "CompiledFunctionBackward"  # the autograd node of a compiled graph


@contextmanager
def compiling_engine(engine: Any, wrap_backend: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap the backend of ``engine.compile()``, and add empty partitions for frozen parameters.

    DeepCompile looks up each parameter's gradient partition; frozen ones have none up to 0.19.2 or
    so.
    """
    module = engine.module
    partitions = zero3.gradient_partitions(engine.optimizer)
    frozen = [p.ds_id for p in module.parameters() if p.ds_id not in partitions]
    partitions.update((ds_id, torch.Tensor()) for ds_id in frozen)
    module.compile = lambda **kwargs: type(module).compile(
        module, **{**kwargs, "backend": wrap_backend(kwargs["backend"])}
    )
    try:
        yield
    finally:
        del module.compile
        for ds_id in frozen:
            del partitions[ds_id]


def disable_native_fallback(engine: Any) -> Callable[[], object]:
    """Disable DeepSpeed's own fallback, and return a function that restores it."""
    if (native := getattr(engine, _NATIVE, None)) is None:
        return lambda: None
    native.release_gathered_params()
    setattr(engine, _NATIVE, None)
    return partial(setattr, engine, _NATIVE, native)


def keep_shapes_static(engine: Any) -> None:
    """Make Dynamo treat the shapes of parameters as static, which is its default.

    From 0.19.4 on DeepCompile makes them dynamic, since its own fallback changes a parameter's
    shape when it gathers. With this patch no shape changes; and a frame that layers of different
    shapes share would be traced with dynamic shapes, on which a partitioned parameter fails.
    """
    restore_config = getattr(engine, "_release_deepcompile_dynamo_config", None)
    if restore_config is not None:
        restore_config()


def remove_leaf_hooks(engine: Any) -> None:
    """Remove the hooks that reduce a leaf module's gradients.

    DeepCompile keeps these hooks, which then look for a bucket that it has removed.
    """
    hooks = engine.optimizer._leaf_module_hooks
    for hook in hooks:
        hook.remove()
    hooks.clear()


def guards_layer_parameters() -> bool:
    """Return True if a frame compiled for one layer is not reused for the next: 0.19.7.

    In older releases the frame's guards do not include the parameters that it gathers.
    """
    from deepspeed.compile import patch_fake_tensor

    return hasattr(patch_fake_tensor, "_zero3_parameter_guard_metadata")


# --- Graphs ---------------------------------------------------------------------------------------


class Graphs:
    """The graphs that DeepCompile has compiled so far, in this process.

    trained: the engine's parameters that get gradients. params: all of its parameters.
    """

    def __init__(self, trained: Sequence[Any], params: Iterable[Any], device: Any) -> None:
        self._trained, self._device = trained, device
        self._ds_ids = [param.ds_id for param in params]
        self._compile_count: tuple[int, int] | None = None  # when `_by_graph` was read
        self._by_graph: dict[int, set[int]] = {}  # ds_ids of each graph's parameters
        self._registered = False  # `_OWN_GRAPH`, since the last compilation
        self._accumulating: set[int] = set()  # graphs whose flags are all set; other graphs' may be
        self._at_boundary = True  # what the graphs were told of this backward
        self._always_accumulates = False  # graphs have overwritten gradients

    def refresh(self) -> None:
        """Forget the graphs if DeepCompile has dropped some, as when it compiles anew."""
        if not self._by_graph.keys() <= _backend().param_manager.keys():
            self._accumulating.clear()
            self._compile_count = None

    def params_written_by(self, graph_id: int) -> set[int]:
        """Return the ids of the parameters whose gradient partitions a graph may overwrite."""
        only_adds = self._always_accumulates and graph_id in self._accumulating
        return set() if only_adds else self._params_by_graph().get(graph_id, set())

    def begin_graph_backward(self, graph_id: int, written: set[int]) -> set[int]:
        """Begin a graph's backward; return the ids of the gradients that it may overwrite.

        written: ids of the partitions that hold gradients of this step; the graph's own are added.
        """
        ids = self._params_by_graph().get(graph_id, set())
        overwritten = set() if graph_id in self._accumulating else ids & written
        if overwritten and not self._always_accumulates:
            self._always_accumulates = True
            self.begin_backward(at_boundary=False)
        if self._at_boundary:
            self._accumulating.discard(graph_id)
        else:
            self._accumulating.add(graph_id)
        written |= ids
        return overwritten

    def has_param(self, ds_id: int) -> bool:
        """Return True if a graph uses this parameter."""
        return any(ds_id in ids for ids in self._params_by_graph().values())

    def _params_by_graph(self) -> dict[int, set[int]]:
        """Return the ids of each graph's parameters, read again after a compilation."""
        backend = _backend()  # which counts compiled forwards and backwards, and graphs
        count = len(backend.opt_pass_times), len(backend.param_manager)
        if self._compile_count != count:
            self._compile_count, self._by_graph, self._registered = count, _by_graph(), False
        return self._by_graph

    def begin_backward(self, at_boundary: bool) -> None:
        """Begin a backward, after DeepCompile has told the graphs about the boundary."""
        self._at_boundary = at_boundary and not self._always_accumulates
        if not self._at_boundary:
            _handle().start_backward(False)

    def after_step(self, failed: bool = False) -> None:
        """Clear the graphs' flags for the next gradients, and mark gathered parameters as stale.

        failed: graphs may hold gradients of a backward that raised; they are reduced, which is
            collective.
        """
        if not self._params_by_graph():
            return
        if not self._registered:  # DeepCompile drops all graphs when it compiles anew
            _handle().register_graph_z3(_OWN_GRAPH, self._ds_ids)
            self._registered = True
        _handle().start_backward(True)
        self._at_boundary = True
        if failed:
            self._end_backward()
            self._accumulating.clear()
        # This graph uses every parameter and has no gradient: its end marks them all as stale.
        self._end_graph_backward(_OWN_GRAPH, release=False)

    def _end_backward(self) -> None:
        """End the backward of each graph that has one. Collective.

        DeepCompile needs a bucket for each dtype of the gradients that a graph has had. Buckets
        are freed when the last graph of a backward ends, and a gradient allocates them: here zeros
        for the graph's smallest parameter of each dtype. The graphs end one after the other, since
        a graph that finds another graph's gradients in a full bucket fails.
        """
        smallest_first = sorted(self._trained, key=lambda param: int(param.ds_numel))
        # A graph without a compiled backward must get no gradient: DeepCompile would measure a
        # backward that ends without a bucket.
        results = _backend().profiling_results
        has_backward = {g for g, result in results.items() if result.bwd_graph is not None}
        by_graph = [(graph, ids) for graph, ids in _by_graph().items() if graph in has_backward]
        for last, (graph_id, ids) in enumerate(by_graph, 1 - len(by_graph)):
            by_dtype: dict[torch.dtype, Any] = {}
            for param in smallest_first:
                if param.ds_id in ids:
                    by_dtype.setdefault(param.dtype, param)
            for param in by_dtype.values():
                zeros = torch.zeros(tuple(param.ds_shape), dtype=param.dtype, device=self._device)
                torch.ops.dc.reduce_grad(zeros, graph_id, param.ds_id)
            self._end_graph_backward(graph_id, release=not last)

    def _end_graph_backward(self, graph_id: int, release: bool) -> None:
        deps = [torch.empty(0, device=self._device)]  # an empty list has no type for an operator
        torch.ops.dc.end_backward(deps, graph_id, release)


def before_backward(inputs: Any, outputs: Any, action: Callable[[], None]) -> None:
    """Run `action` before the backward of a compiled graph, if it has one.

    inputs, outputs: those of the graph's forward. Raises Refused if autograd has not recorded it.
    """
    seen = {None, *_grad_fns(inputs)}
    pending = [node for node in _grad_fns(outputs) if node not in seen]
    if not pending:
        return
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        if node.name() == _NODE:
            node.register_prehook(lambda grads: action())
            return
        seen.add(node)
        pending.extend(next_node for next_node, _ in node.next_functions)
    raise Refused("autograd has not recorded the backward of this compiled graph: please report it")


def _grad_fns(outputs: Any) -> list[Any]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn]


@contextmanager
def compiling_graph(gm: Any) -> Iterator[None]:
    """Make DeepCompile forget, while it compiles a graph, that its frame had a backward before.

    An evaluation's graph has no backward, and DeepCompile would wait for one. While it waits, with
    torch 2.11 and older, it compiles every backward anew and measures it with freed buckets: the
    C++ code aborts the process.
    """
    backend = _backend()
    frame = gm.meta["dynamo_compile_id"].frame_id
    had_backward = frame in backend.frames_partitioned
    backend.frames_partitioned.discard(frame)
    try:
        yield
    finally:
        if had_backward:  # the earlier graph still has it
            backend.graph_order_with_frame_id.set_needs_backward(frame, True)


def _by_graph() -> dict[int, set[int]]:
    managers = _backend().param_manager
    return {graph: set(params.ds_ids.values()) for graph, params in managers.items()}


def _backend() -> Any:
    from deepspeed.compile import backend

    return backend


def _handle() -> Any:
    from deepspeed.compile.util import get_deepcompile_handle

    return get_deepcompile_handle()
