"""The gradients that DeepCompile's graphs reduce by themselves, in C++.

Each graph writes the first gradient that it has of a parameter into the partition and adds those
that follow, by a mark of its own per parameter, which it takes back when a backward at the
boundary ends in it. So gradients are lost wherever that is not all: the graph runs twice in that
backward, as after two forwards; or two graphs use the parameter. Here the marks are taken back when
a step has been made and never else; and what two graphs share is marked before either writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


class Graphs:
    """What DeepCompile has compiled so far, in this process."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def param_ids(self) -> set[int]:
        """The ``ds_id`` of each parameter that some graph uses."""
        return {ds_id for ids in self._by_graph().values() for ds_id in ids}

    def mark_shared(self, trained: Iterable[Any]) -> None:
        """Before the first backward of a step: of what several graphs use, all are to add.

        The only way to a mark is a gradient, so each graph reduces zeros; the partitions must be
        zeroed after that. A collective.
        """
        if not _can_end_backward():
            return
        import torch

        by_graph = self._by_graph()
        graphs_of = Counter(ds_id for ids in by_graph.values() for ds_id in ids)
        shared = [param for param in trained if graphs_of[param.ds_id] > 1]
        if not shared:
            return
        _handle().start_backward(False)
        for graph_id, ids in by_graph.items():
            for param in shared:
                if param.ds_id in ids:
                    shape = tuple(param.ds_shape)
                    zeros = torch.zeros(shape, dtype=param.dtype, device=self._device)
                    torch.ops.dc.reduce_grad(zeros, graph_id, param.ds_id)
            self._end_backward(graph_id)

    def begin_backward(self) -> None:
        """Right after DeepCompile's own prologue: no graph takes its marks back."""
        if _can_end_backward():
            _handle().start_backward(False)

    def stepped(self) -> None:
        """After a step: the next gradients are new, and what is kept gathered is stale.

        Also sends off whatever a backward that raised has left in a graph's buckets, which is a
        collective then.
        """
        if not _can_end_backward():
            return
        by_graph = self._by_graph()
        if by_graph:
            _handle().start_backward(True)
        for graph_id in by_graph:
            self._end_backward(graph_id)

    def _end_backward(self, graph_id: int) -> None:
        import torch

        end = torch.ops.dc.end_backward
        named = [argument.name for argument in end.default._schema.arguments]
        nothing = [torch.empty(0, device=self._device)]
        given = {"deps": nothing, "graph_id": graph_id, "release_reduce_buckets": False}
        end(*(given[name] for name in named))

    def _by_graph(self) -> dict[int, set[int]]:
        from deepspeed.compile import backend

        return {graph: set(known.ds_ids.values()) for graph, known in backend.param_manager.items()}


def _handle() -> Any:
    from deepspeed.compile.util import get_deepcompile_handle

    return get_deepcompile_handle()


def _can_end_backward() -> bool:
    """Whether the end of a graph's backward can be asked for from here: 0.18.0 and later."""
    import torch

    _handle()  # registers the operators
    return hasattr(torch.ops.dc, "end_backward")
