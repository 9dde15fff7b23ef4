"""What DeepCompile's graphs do by themselves, in C++: gather, and reduce gradients.

Each graph writes the first gradient that it has of a parameter into the partition and adds those
that follow, by a mark of its own per parameter, which it takes back when a backward at the
boundary ends in it. That loses gradients where the graph runs twice in such a backward, as after
two forwards, and where two graphs use the parameter. So the marks are kept in the first case, and
set beforehand in the second.

With the end of such a backward a graph also takes what it keeps gathered, from the sixth step on,
for stale. But the end waits for the graph's gradients alone: where a parameter is gathered for what
the graph hands back to another, that may come later, and stays for the next step; and so does what
was gathered when DeepCompile chose what to keep, and by a graph that ran in an evaluation alone. So
at each step all of it is taken for stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

_OURS = -1  # a graph of ours in DeepCompile's books; its own are known by their addresses


class Graphs:
    """What DeepCompile has compiled so far, in this process.

    trained: the engine's parameters that get gradients. params: all of them.
    """

    def __init__(self, trained: Sequence[Any], params: Iterable[Any], device: Any) -> None:
        self._trained, self._device = trained, device
        self._ds_ids = [param.ds_id for param in params]
        self._kept = False
        self._compiled = -1  # what our own graph was registered after

    def param_ids(self) -> set[int]:
        """The ``ds_id`` of each parameter that some graph uses."""
        return {ds_id for ids in _by_graph().values() for ds_id in ids}

    def mark_shared(self, ran: Collection[int], at_boundary: bool) -> None:
        """Of what several of these graphs use, have all of them add.

        at_boundary: what DeepCompile has told the graphs of this backward.
        The partitions must be zeroed after. The only way to a mark is a gradient, so each graph
        reduces zeros: a collective, and one more reduction of each parameter that they share.
        """
        by_graph = {graph: ids for graph, ids in _by_graph().items() if graph in ran}
        graphs_of = Counter(ds_id for ids in by_graph.values() for ds_id in ids)
        shared = {ds_id for ds_id, graphs in graphs_of.items() if graphs > 1}
        if not any(param.ds_id in shared for param in self._trained) or not can_end_backward():
            return
        _handle().start_backward(False)
        self._end_backward(by_graph, shared)
        _handle().start_backward(at_boundary)

    def keep_marks(self) -> None:
        """Right after DeepCompile's own prologue: a graph may run twice in this backward."""
        if can_end_backward():
            _handle().start_backward(False)
            self._kept = True

    @property
    def kept_marks(self) -> bool:
        """Whether graphs still add."""
        return self._kept

    def stepped(self, failed: bool = False) -> None:
        """After a step: the next gradients are new, and what is kept gathered is stale.

        `failed`: graphs may hold gradients of a backward that raised; on every rank, as this sends
        them off.
        """
        by_graph = _by_graph()
        if by_graph and can_end_backward():
            _handle().start_backward(True)
            if self._kept or failed:
                self._end_backward(by_graph)
            self._forget_gathered()
        self._kept = False

    def _forget_gathered(self) -> None:
        """End the backward of a graph that uses every parameter and has no gradient."""
        if self._compiled != (compiled := _compilations()):  # DeepCompile may have begun anew
            _handle().register_graph_z3(_OURS, self._ds_ids)
            self._compiled = compiled
        self._end_one(_OURS, release=False)

    def _end_backward(self, by_graph: dict[int, set[int]], zeros_of: Collection[int] = ()) -> None:
        """End the backward of each graph.

        It needs a bucket of each dtype that it has ever had a gradient of. Buckets go when the last
        graph of a backward ends, and come with a gradient: here zeros, of the graph's smallest
        parameter of each dtype, or of all those in `zeros_of`. One graph after the other, as a
        graph that finds another's gradients in a full bucket fails.
        """
        for last, (graph_id, ids) in enumerate(by_graph.items(), 1 - len(by_graph)):
            smallest: dict[torch.dtype, Any] = {}
            for param in sorted(self._trained, key=lambda param: int(param.ds_numel)):
                if param.ds_id in ids:
                    first = smallest.setdefault(param.dtype, param) is param
                    if first or param.ds_id in zeros_of:
                        self._reduce_zeros(param, graph_id)
            self._end_one(graph_id, release=not last)

    def _end_one(self, graph_id: int, release: bool) -> None:
        end = torch.ops.dc.end_backward
        deps = [torch.empty(0, device=self._device)]  # an empty list has no type for an operator
        given = {"deps": deps, "graph_id": graph_id, "release_reduce_buckets": release}
        end(*(given[argument.name] for argument in end.default._schema.arguments))

    def _reduce_zeros(self, param: Any, graph_id: int) -> None:
        zeros = torch.zeros(tuple(param.ds_shape), dtype=param.dtype, device=self._device)
        torch.ops.dc.reduce_grad(zeros, graph_id, param.ds_id)


def id_of(gm: Any) -> int:
    """By what DeepCompile knows the graph that it is given to compile."""
    return id(gm.graph)


def _by_graph() -> dict[int, set[int]]:
    from deepspeed.compile import backend

    return {graph: set(known.ds_ids.values()) for graph, known in backend.param_manager.items()}


def _compilations() -> int:
    """How many forwards and backwards of graphs have been compiled."""
    from deepspeed.compile import backend

    return len(backend.opt_pass_times)


def keep_nothing_gathered() -> None:
    """Take the pass away that keeps parameters gathered between steps, where `can_end_backward` is
    false: nothing tells the graphs there that what they keep is stale.
    """
    from deepspeed.compile import backend
    from deepspeed.compile.passes import selective_gather

    if backend.next_passes and not can_end_backward():
        keeps = selective_gather.selective_gather
        backend.next_passes = [one for one in backend.next_passes if one is not keeps]


def _handle() -> Any:
    from deepspeed.compile.util import get_deepcompile_handle

    return get_deepcompile_handle()


def can_end_backward() -> bool:
    """Whether the end of a graph's backward can be asked for from here: 0.18.0 and later."""
    _handle()  # registers the operators
    return hasattr(torch.ops.dc, "end_backward")
