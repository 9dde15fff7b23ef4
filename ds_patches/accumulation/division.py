"""Where an engine of stages 0 to 2 divides gradients by the micro steps: once on each way.

From 0.18.3 on they are divided wherever they come to an output. Of outputs that lead to one
another, as a loss to logits and they to hidden states, those of the deeper ones were divided at
each above. So each output gets a tensor of its own here, as it has at stage 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from ds_patches.core.calls import meanwhile
from ds_patches.training.graph_task import with_graphs
from ds_patches.training.kept import Attached
from ds_patches.upstream import engine as upstream_engine


class Division:
    """Of one engine."""

    def __init__(self, engine: Any) -> None:
        #: In a backward whose loss was divided by the micro steps: outputs need not do it.
        self.has_divided = False
        self._handle: RemovableHandle | None = None
        self.follow(engine)

    def follow(self, engine: Any) -> None:
        """Keep outputs apart from the first forward on that is one of several micro steps."""
        is_single = engine.gradient_accumulation_steps() == 1
        # A compiler would take the hook into its graph.
        is_compiled = upstream_engine.is_compiled(engine)
        left = engine.zero_optimization_partition_weights() or is_compiled
        if is_single or left or self._handle is not None:
            return
        here = ref(engine)

        def keep_apart(module: Any, args: Any, outputs: Any) -> Any:
            living = here()
            if living is None or living.gradient_accumulation_steps() == 1:
                return outputs
            return apart(outputs) if len(with_graphs(outputs)) > 1 else outputs

        self._handle = engine.module.register_forward_hook(keep_apart)

    def backward(
        self,
        run: Callable[..., Any],
        engine: Any,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        """Divide the loss of ``engine.backward``, which `run` is, so that no output has to."""
        if scale_wrt_gas:
            loss = loss / engine.gradient_accumulation_steps()
        with meanwhile(self, has_divided=True):
            return run(loss, retain_graph, scale_wrt_gas=False)

    def detach(self) -> None:
        """Leave the engine's outputs to stock."""
        if self._handle is not None:
            self._handle.remove()


def apart(outputs: Any) -> Any:
    """Return the same values, each with a node of its own in the graph.

    Dicts and lists stay the objects that they are, as transformers' outputs.
    """
    if isinstance(outputs, torch.Tensor):
        is_inner = outputs.grad_fn is not None and outputs.layout == torch.strided
        return outputs.view_as(outputs) if is_inner else outputs
    if isinstance(outputs, (list, dict)):
        for key, item in [*(outputs.items() if isinstance(outputs, dict) else enumerate(outputs))]:
            outputs[key] = apart(item)
    elif isinstance(outputs, tuple):
        items = map(apart, outputs)
        # A named tuple takes its fields one by one.
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    return outputs


def _division_of(engine: Any) -> Division | None:
    divides = upstream_engine.divides_gradients(engine) and not upstream_engine.is_left(engine)
    return Division(engine) if divides else None


divisions: Attached[Division] = Attached("accumulation_division", _division_of)
