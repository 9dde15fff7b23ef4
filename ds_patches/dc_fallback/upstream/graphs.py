"""The gradients that DeepCompile's graphs reduce by themselves, in C++.

Each graph writes the first gradient that it has of a parameter into the partition and adds those
that follow, by a mark of its own per parameter, which it takes back when a backward at the
boundary ends in it. That loses gradients where the graph runs twice in such a backward, as after
two forwards, and where two graphs use the parameter. So the marks are kept in the first case, and
set beforehand in the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch


class Graphs:
    """What DeepCompile has compiled so far, in this process.

    trained: the engine's parameters that get gradients.
    """

    def __init__(self, trained: Sequence[Any], device: Any) -> None:
        self._trained, self._device = trained, device
        self._kept = False

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
        shared = [param for param in self._trained if graphs_of[param.ds_id] > 1]
        if not shared or not _can_end_backward():
            return
        _handle().start_backward(False)
        for graph_id, ids in by_graph.items():
            for param in shared:
                if param.ds_id in ids:
                    self._reduce_zeros(param, graph_id)
        self._end_backward(by_graph)
        _handle().start_backward(at_boundary)

    def keep_marks(self) -> None:
        """Right after DeepCompile's own prologue: a graph may run twice in this backward."""
        if _can_end_backward():
            _handle().start_backward(False)
            self._kept = True

    @property
    def kept_marks(self) -> bool:
        """Whether graphs still add."""
        return self._kept

    def stepped(self, failed: bool = False) -> None:
        """After a step: the next gradients are new, and what is kept gathered is stale.

        DeepCompile sees to that at the boundary, unless the marks were kept. `failed`: graphs may
        hold gradients of a backward that raised; on every rank, as this sends them off.
        """
        by_graph = _by_graph()
        if by_graph and (self._kept or failed) and _can_end_backward():
            _handle().start_backward(True)
            self._end_backward(by_graph)
        self._kept = False

    def _end_backward(self, by_graph: dict[int, set[int]]) -> None:
        """End the backward of each graph. All of them need a bucket of each dtype they ever used.

        Buckets go when the last graph of a backward ends, and come with a gradient: here zeros, of
        the smallest parameter of each dtype.
        """
        for dtype in sorted({param.dtype for param in self._trained}, key=str):
            of_dtype = [
                (int(param.ds_numel), graph_id, at)
                for at, param in enumerate(self._trained)
                for graph_id, ids in by_graph.items()
                if param.dtype == dtype and param.ds_id in ids
            ]
            if of_dtype:
                _, graph_id, at = min(of_dtype, key=lambda found: (found[0], found[2]))
                self._reduce_zeros(self._trained[at], graph_id)
        end = torch.ops.dc.end_backward
        named = [argument.name for argument in end.default._schema.arguments]
        deps = [torch.empty(0, device=self._device)]  # an empty list has no type for an operator
        for last, graph_id in enumerate(by_graph, 1 - len(by_graph)):
            given = {"deps": deps, "graph_id": graph_id, "release_reduce_buckets": not last}
            end(*(given[name] for name in named))

    def _reduce_zeros(self, param: Any, graph_id: int) -> None:
        zeros = torch.zeros(tuple(param.ds_shape), dtype=param.dtype, device=self._device)
        torch.ops.dc.reduce_grad(zeros, graph_id, param.ds_id)


def id_of(gm: Any) -> int:
    """By what DeepCompile knows the graph that it is given to compile."""
    return id(gm.graph)


def _by_graph() -> dict[int, set[int]]:
    from deepspeed.compile import backend

    return {graph: set(known.ds_ids.values()) for graph, known in backend.param_manager.items()}


def _handle() -> Any:
    from deepspeed.compile.util import get_deepcompile_handle

    return get_deepcompile_handle()


def _can_end_backward() -> bool:
    """Whether the end of a graph's backward can be asked for from here: 0.18.0 and later."""
    _handle()  # registers the operators
    return hasattr(torch.ops.dc, "end_backward")
