"""Stage 1 with bf16 parameters and fp32 gradients: the optimizer adds up by itself."""

from __future__ import annotations

from typing import Any


class MasterSum:
    """The fp32 gradients of one ``BF16_Optimizer`` over the backwards of a step.

    Every backward's epilogue adds the bf16 gradients to them, every prologue clears the bf16 ones:
    nothing is left to do but to forget.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def begin_backward(self) -> None:
        """Nothing to prepare."""

    def begin_backward_again(self) -> None:
        """Nothing to prepare."""

    def drop(self) -> None:
        """Forget the step's gradients so far."""
        self._optimizer.clear_lp_grads()
        self._optimizer.clear_hp_grads()

    def abandon(self) -> None:
        """A backward raised: forget the step's gradients so far."""
        self.drop()

    def step_taken(self) -> None:
        """The optimizer clears its gradients itself."""
