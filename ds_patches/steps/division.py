"""Where gradients are divided by the micro steps: once on each way from a loss to a parameter.

From 0.18.3 on a plain ``loss.backward()`` is divided wherever it comes to an output of an engine.
Where outputs lead to one another, as a loss to logits and they to hidden states, or the outputs of
one engine to those of another, what reaches the deeper ones was divided above already. No hook can
tell it from what a script has made of the deeper output itself. But it comes along other edges of
the graph: those that leave a node of the upper output's forward. On them the division is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch

from ds_patches.core.calls import meanwhile
from ds_patches.steps.attached import Attached
from ds_patches.steps.graph_task import at_end_of_task, current_task_id, with_graphs
from ds_patches.upstream import engine as upstream_engine

#: In the metadata of an autograd node: which of its results are outputs of an engine, by number.
_OUTPUTS = "ds_patches.outputs"
#: The same of one from which on the edges to other outputs undo the division already.
_WALKED = "ds_patches.walked"


class Division:
    """Divides the plain backwards over one engine's forwards."""

    #: ``engine.backward`` runs and has divided its loss: outputs, of whichever engine, need not.
    has_divided: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        self._engine = ref(engine)
        self._tasks: set[int] = set()  # the graph tasks that run, and in which outputs divide

    @property
    def _micro_steps(self) -> int:
        engine = self._engine()
        return 1 if engine is None else int(engine.gradient_accumulation_steps())

    def forward_ran(self, inputs: Any, outputs: list[torch.Tensor]) -> None:
        """Mark the outputs of a forward. A single one of inputs without a graph leads to none."""
        alone = len(outputs) < 2 and not any(with_graphs(inputs))
        for output in outputs:
            marks: Any = output.grad_fn.metadata  # type: ignore[union-attr]
            numbers = marks.setdefault(_OUTPUTS, set())
            if output.output_nr in numbers:  # one that comes twice is divided twice
                output.register_hook(self._undone)  # type: ignore[no-untyped-call]
            numbers.add(output.output_nr)
            if alone:
                marks[_WALKED] = True

    def divided(self) -> None:
        """Note that a gradient was divided at an output, the node of the graph that runs."""
        if (task := current_task_id()) not in self._tasks:
            self._tasks.add(task)
            at_end_of_task(partial(self._tasks.discard, task))
        node: Any = torch._C._current_autograd_node()
        marks = node.metadata
        if _OUTPUTS in marks and not marks.get(_WALKED):
            self._undo_beneath(node)

    def _undo_beneath(self, node: Any) -> None:
        """Find the edges to the next outputs beneath a node. What lies beneath those is theirs."""
        node.metadata[_WALKED] = True
        pending = [node]
        for above in pending:  # which become more
            edges = []
            for at, (beneath, number) in enumerate(above.next_functions):
                marks = {} if beneath is None else beneath.metadata
                if number in marks.get(_OUTPUTS, ()):
                    edges.append(at)
                elif beneath is not None and not marks.get(_WALKED):
                    marks[_WALKED] = True
                    pending.append(beneath)
            if edges:
                above.register_hook(self._undoing(edges))

    def _undoing(self, edges: list[int]) -> Callable[[Any, Any], Any]:
        def undo(gradients: Any, _: Any) -> Any:
            return tuple(
                self._undone(gradient) if at in edges else gradient
                for at, gradient in enumerate(gradients)
            )

        return undo

    def _undone(self, gradient: Any) -> Any:
        """Undo the division of a gradient, unless the running backward does not divide."""
        if gradient is None or current_task_id() not in self._tasks:
            return gradient
        return gradient * self._micro_steps


def divided_backward(
    run: Callable[..., Any],
    engine: Any,
    loss: torch.Tensor,
    retain_graph: bool = False,
    scale_wrt_gas: bool = True,
) -> Any:
    """Divide the loss of ``engine.backward``, which `run` is, so that no output has to.

    Those of a forward from before the patch have hooks that know of `scale_wrt_gas` alone. The
    engine keeps it for plain backwards that follow.
    """
    if scale_wrt_gas:
        loss = loss / engine.gradient_accumulation_steps()
    with meanwhile(Division, has_divided=True):
        try:
            run(loss, retain_graph, scale_wrt_gas=False)
        finally:
            upstream_engine.keep_scale(engine, scale_wrt_gas)
    return loss


def _division_of(engine: Any) -> Division | None:
    divides = upstream_engine.divides_gradients(engine) and not upstream_engine.is_left(engine)
    return Division(engine) if divides else None


divisions: Attached[Division] = Attached("accumulation_division", _division_of)
