"""The gradients of one step, on the parameters of one optimizer, outside any window.

Unlike a window, a step has no handshake: every parameter takes part in every reduction, with zeros
where this rank has no gradient, so that ranks need not know of each other what they have.
"""

from __future__ import annotations

from typing import Any, Protocol

from . import flat_flush
from .upstream import flat, flat_layout, stage3


class StepSum(Protocol):
    """What micro steps ask of the gradients of their ZeRO stage.

    is_lost_before_the_boundary: upstream loses micro steps, in some release.
    """

    is_lost_before_the_boundary: bool

    def has_gradients(self) -> bool:
        """Whether any parameter has one."""

    def reduce(self, again: bool) -> None:
        """Reduce, and leave the optimizer as the boundary backward of a step would.

        again: add to what was reduced before in this step, instead of replacing it.
        """

    def clear(self) -> None:
        """Forget the gradients that wait on the parameters."""

    def recover(self) -> None:
        """Make ready for the next forward after a backward that raised; gradients stay."""


class FlatStepSum:
    """Stages 1 and 2."""

    def __init__(self, optimizer: Any, scatters: bool) -> None:
        """`scatters`: reduce-scatter past upstream's reducer, where that is known to be right."""
        self._optimizer = optimizer
        self._scatters = scatters and flat_layout.covers(optimizer)
        self.is_lost_before_the_boundary = flat.is_offloaded(optimizer)

    def has_gradients(self) -> bool:
        params = flat.parameters(self._optimizer)
        return any(flat.gradient(self._optimizer, param) is not None for _, param in params)

    def reduce(self, again: bool) -> None:
        optimizer = self._optimizer
        flat.settle(optimizer)
        before = flat.reduced(optimizer) if again else None
        flat.begin_only_backward(optimizer)
        if self._scatters:
            flat_flush.flush(optimizer)
        else:
            for _, param in flat.parameters(optimizer):
                if flat.gradient(optimizer, param) is None:
                    flat.give_zeros(optimizer, param)
            flat.reduce(optimizer)
        if before is not None:
            flat.add_reduced(optimizer, before)

    def clear(self) -> None:
        flat.clear(self._optimizer)

    def recover(self) -> None:
        """Nothing was gathered, and nothing is in a bucket."""


class PartitionedStepSum:
    """Stage 3."""

    is_lost_before_the_boundary = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in stage3.parameters(self._optimizer))

    def reduce(self, again: bool) -> None:
        for param in stage3.parameters(self._optimizer):
            if param.grad is None:
                stage3.give_zeros(param)
        stage3.reduce(self._optimizer, adds=again)

    def clear(self) -> None:
        stage3.clear(self._optimizer)

    def recover(self) -> None:
        stage3.reset_gathers(self._optimizer)
