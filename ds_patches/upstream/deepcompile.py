"""Engines that DeepCompile has taken over, its graphs, and the fallback of 0.19.3 and later.

The graphs gather and reduce gradients by themselves, in C++.

Each graph writes the first gradient that it has of a parameter into the partition and adds those
that follow, by a mark of its own per parameter, which it takes back when a backward at the boundary
ends in it. That loses gradients where a step has several backwards, or two graphs use a parameter:
what a graph is about to write over has to be set aside. An engine whose graphs have done so once is
told from then on that no backward is at the boundary: a graph then writes in its first one alone.
To add takes longer than to write, so other engines are left to their marks.

With the end of a backward at the boundary a graph also takes what it keeps gathered, from the sixth
step on, for stale. But the end waits for the graph's gradients alone: where a parameter is gathered
for what the graph hands back to another, that may come later, and stays for the next step; and so
does what was gathered when DeepCompile chose what to keep, and by a graph that ran in an evaluation
alone. So at each step all of it is taken for stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_patches.core.errors import Refused
from ds_patches.upstream import zero3

_NATIVE = "_deepcompile_z3_eager_fallback"
_OURS = -1  # a graph of ours in DeepCompile's books; its own are known by their addresses
_NODE = "CompiledFunctionBackward"  # in autograd, a graph's backward


@contextmanager
def compiling_engine(engine: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Around ``engine.compile()``: hand the module a changed backend, and give frozen parameters
    the empty gradient partitions that DeepCompile looks for, up to 0.19.2 or so in vain.
    """
    module = engine.module
    partitions = zero3.gradient_partitions(engine.optimizer)
    frozen = [p.ds_id for p in module.parameters() if p.ds_id not in partitions]
    partitions.update((ds_id, torch.Tensor()) for ds_id in frozen)
    module.compile = lambda **given: type(module).compile(
        module, **{**given, "backend": change(given["backend"])}
    )
    try:
        yield
    finally:
        del module.compile
        for ds_id in frozen:
            del partitions[ds_id]


def disown(engine: Any) -> Callable[[], object]:
    """Take DeepSpeed's own fallback away, so that there is one owner; return what undoes that."""
    if (native := getattr(engine, _NATIVE, None)) is None:
        return lambda: None
    native.release_gathered_params()
    setattr(engine, _NATIVE, None)
    return partial(setattr, engine, _NATIVE, native)


def keep_shapes_static(engine: Any) -> None:
    """Have Dynamo take the shapes of parameters for what they are, as it does by itself.

    From 0.19.4 DeepCompile lets them vary, since a parameter that its own fallback has gathered has
    another shape. Under this patch none has; and a frame that several layers share, with shapes
    that do differ, would be traced for any shape, which a partitioned parameter then fails.
    """
    put_back = getattr(engine, "_release_deepcompile_dynamo_config", None)
    if put_back is not None:
        put_back()


def drop_leaf_hooks(engine: Any) -> None:
    """Remove the hooks that reduce a leaf module's gradients.

    DeepCompile forgets them, and they then look for a bucket that it has taken away.
    """
    hooks = engine.optimizer._leaf_module_hooks
    for hook in hooks:
        hook.remove()
    hooks.clear()


def tells_layers_apart() -> bool:
    """Return True if a frame compiled for one layer is not used for the next: 0.19.7 and later.

    Before, nothing in its guards says which parameter it gathers.
    """
    from deepspeed.compile import patch_fake_tensor

    return hasattr(patch_fake_tensor, "_zero3_parameter_guard_metadata")


def leaves(engine: Any) -> Sequence[Any]:
    """The ZeRO-3 leaf modules, of which ranks may use other parts."""
    from deepspeed.utils import get_z3_leaf_modules

    found: list[Any] = get_z3_leaf_modules(engine.module)
    return found


# --- Graphs ---------------------------------------------------------------------------------------


class Graphs:
    """What DeepCompile has compiled so far, in this process.

    trained: the engine's parameters that get gradients. params: all of them.
    """

    def __init__(self, trained: Sequence[Any], params: Iterable[Any], device: Any) -> None:
        self._trained, self._device = trained, device
        self._ds_ids = [param.ds_id for param in params]
        self._known: tuple[int, int] | None = None  # what DeepCompile had compiled when we looked
        self._by_graph: dict[int, set[int]] = {}  # the parameters of each graph
        self._registered = False  # our own graph, since then
        self._adding: set[int] = set()  # graphs whose marks are set; others' may be
        self._at_boundary = True  # what the graphs were told of the backward
        self._adds_up = False

    def look_again(self) -> None:
        """DeepCompile may have begun anew, and forgotten all graphs."""
        if not self._by_graph.keys() <= _backend().param_manager.keys():
            self._adding.clear()
            self._known = None

    def may_write(self, graph_id: int) -> set[int]:
        """The parameters, by ``ds_id``, whose gradients the graph's next backward may write."""
        certain = self._adds_up and graph_id in self._adding
        return set() if certain else self._of_graphs().get(graph_id, set())

    def begin_in(self, graph_id: int, written: set[int]) -> set[int]:
        """A backward begins in a graph; return what of `written` it may write over.

        All that it has gradients of is then written, too.
        """
        ids = self._of_graphs().get(graph_id, set())
        over = set() if graph_id in self._adding else ids & written
        if over and not self._adds_up:
            self._adds_up = True
            self.begin(at_boundary=False)
        if self._at_boundary:
            self._adding.discard(graph_id)
        else:
            self._adding.add(graph_id)
        written |= ids
        return over

    def has(self, ds_id: int) -> bool:
        """Return True if some graph uses this parameter."""
        return any(ds_id in ids for ids in self._of_graphs().values())

    def _of_graphs(self) -> dict[int, set[int]]:
        """The parameters of each graph; looked up when something was compiled."""
        if self._known != (now := _compiled()):
            self._known, self._by_graph, self._registered = now, _by_graph(), False
        return self._by_graph

    def begin(self, at_boundary: bool) -> None:
        """A backward begins: DeepCompile has told the graphs whether it is at the boundary."""
        self._at_boundary = at_boundary and not self._adds_up
        if not self._at_boundary:
            _handle().start_backward(False)

    def stepped(self, failed: bool = False) -> None:
        """After a step: the next gradients are new, and what is kept gathered is stale.

        `failed`: graphs may hold gradients of a backward that raised; on every rank, as this sends
        them off.
        """
        if not self._of_graphs():
            return
        if not self._registered:  # DeepCompile may have begun anew
            _handle().register_graph_z3(_OURS, self._ds_ids)
            self._registered = True
        _handle().start_backward(True)
        self._at_boundary = True
        if failed:
            self._end_backward()
            self._adding.clear()
        # Of a graph that uses every parameter and has no gradient: what is gathered is stale.
        self._end_one(_OURS, release=False)

    def _end_backward(self) -> None:
        """End the backward of each graph that has one.

        It needs a bucket of each dtype that it has ever had a gradient of. Buckets go when the last
        graph of a backward ends, and come with a gradient: here zeros, of the graph's smallest
        parameter of each dtype. One graph after the other, as one that finds another's gradients in
        a full bucket fails.
        """
        smallest_first = sorted(self._trained, key=lambda param: int(param.ds_numel))
        # Without a compiled backward a graph has no gradients, and must not: DeepCompile would
        # measure a backward that ends without a bucket.
        results = _backend().profiling_results
        has_backward = {g for g, result in results.items() if result.bwd_graph is not None}
        by_graph = [(graph, ids) for graph, ids in _by_graph().items() if graph in has_backward]
        for last, (graph_id, ids) in enumerate(by_graph, 1 - len(by_graph)):
            of_dtype: dict[torch.dtype, Any] = {}
            for param in smallest_first:
                if param.ds_id in ids:
                    of_dtype.setdefault(param.dtype, param)
            for param in of_dtype.values():
                zeros = torch.zeros(tuple(param.ds_shape), dtype=param.dtype, device=self._device)
                torch.ops.dc.reduce_grad(zeros, graph_id, param.ds_id)
            self._end_one(graph_id, release=not last)

    def _end_one(self, graph_id: int, release: bool) -> None:
        deps = [torch.empty(0, device=self._device)]  # an empty list has no type for an operator
        torch.ops.dc.end_backward(deps, graph_id, release)


def before_backward(inputs: Any, outputs: Any, action: Callable[[], None]) -> None:
    """Have `action` run before the backward of the graph that these are of, if it has one."""
    seen = {None, *_nodes_of(inputs)}
    pending = [node for node in _nodes_of(outputs) if node not in seen]
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
        pending.extend(beneath for beneath, _ in node.next_functions)
    raise Refused("the backward of a compiled graph is not in what autograd has recorded of it")


def _nodes_of(given: Any) -> list[Any]:
    tensors = given if isinstance(given, (tuple, list)) else (given,)
    return [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn]


@contextmanager
def compiling_graph(gm: Any) -> Iterator[None]:
    """Around DeepCompile's work on a graph: forget that an earlier one of its frame had a backward.

    Of the graph of an evaluation, which has none, DeepCompile would otherwise wait for one. As long
    as it waits it compiles again every backward that runs, with torch 2.11 and older, and measures
    it with buckets that are gone: the C++ aborts the process.
    """
    backend = _backend()
    frame = gm.meta["dynamo_compile_id"].frame_id
    had = frame in backend.frames_partitioned
    backend.frames_partitioned.discard(frame)
    try:
        yield
    finally:
        if had:  # its earlier graph has one still
            backend.graph_order_with_frame_id.set_needs_backward(frame, True)


def _by_graph() -> dict[int, set[int]]:
    known = _backend().param_manager
    return {graph: set(of.ds_ids.values()) for graph, of in known.items()}


def _compiled() -> tuple[int, int]:
    """How many forwards and backwards of graphs have been, and how many graphs there are."""
    backend = _backend()
    return len(backend.opt_pass_times), len(backend.param_manager)


def _backend() -> Any:
    from deepspeed.compile import backend

    return backend


def _handle() -> Any:
    from deepspeed.compile.util import get_deepcompile_handle

    return get_deepcompile_handle()
