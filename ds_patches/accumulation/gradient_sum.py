"""What the steps of an engine ask of its gradients."""

from __future__ import annotations


class GradientSum:
    """How a ZeRO stage adds up the backwards of one step: where it says nothing, by itself."""

    def begin_backward(self) -> None:
        """A backward begins; what it reduces is added."""

    def complete(self) -> None:
        """A step is about to read the gradients."""

    def drop(self) -> None:
        """Forget the step's gradients so far."""

    def abandon(self) -> None:
        """A backward raised: drop what waits in the buckets, and the step's gradients with it."""
        self.drop()

    def step_taken(self) -> None:
        """The optimizer has consumed the gradients."""

    def detach(self) -> None:
        """Leave the optimizer to stock."""
