"""What adds up the gradients of a step: the base of `zero12_sum`, `zero3_sum` and `bf16_sum`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.layer import Layer
from ds_patches.steps.ranks import on_any


class GradientSum:
    """How a ZeRO stage adds up the backwards of one step. A method does nothing unless overridden.

    A backward brings reduced gradients. In a block it brings local ones, which autograd adds up on
    the parameters, until `reduce_local` brings the sum as one backward would.

    layers: around methods of the engine and its optimizer, until they are left to stock.
    """

    #: Whether DeepSpeed itself calls zero_grad() now: no user has asked for that.
    upstream_zeroes = False
    #: Whether zero_grad() right after ``engine.step()`` has counted a micro step drops nothing.
    keeps_earlier_micro_steps = True

    #: By how much the gradients that have come are still to be divided, as they are reduced.
    divisor = 1

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        #: Whether the gradients of earlier backwards of the step may be on the parameters.
        self.holds_local = False
        self._trained_before: set[Any] = set()
        self._marks: list[tuple[int, int]] = []

    def expect(self, divisor: int, is_first: bool = False) -> None:
        """Have the gradients of the backward that begins divided by `divisor` at their reduction.

        They add to local ones, which are made to be divided by the same; is_first: there are none.
        """
        before, self.divisor = self.divisor, divisor
        if before != divisor and self.holds_local and not is_first:
            divide(self.local(), before / divisor)

    def local(self) -> list[torch.Tensor]:
        """Return the gradients that have come and are not reduced."""
        return [param.grad for param in self.trained() if param.grad is not None]

    def begin_backward(self) -> None:
        """Let the backward that begins add what it reduces."""

    def has_come(self) -> bool:
        """Return True if the backward that raised has brought a gradient, or may have."""
        return self._marks != self.marks()

    def note(self) -> None:
        """Note the gradients on the parameters, as a backward begins, for `has_come`."""
        self._marks = self.marks()

    def marks(self) -> list[tuple[int, int]]:
        """Return what tells whether a gradient on a parameter is another, or has been added to."""
        gradients = [param.grad for param in self.parameters() if param.grad is not None]
        return [(id(gradient), gradient._version) for gradient in gradients]

    def pass_by(self) -> bool:
        """End a backward that has brought nothing; return whether to skip DeepSpeed's epilogue."""
        return False

    def lacks(self, unreduced: bool) -> bool:
        """Return whether a step lacks gradients, as no backward has run at the boundary.

        unreduced: whether earlier micro steps have brought some.
        """
        return False

    def complete(self) -> None:
        """Make the gradients whole, as a step is about to read them."""

    def drop(self) -> None:
        """Forget the step's gradients so far."""

    def spare(self) -> None:
        """End a backward that raised before it has brought anything."""
        self.pass_by()

    def abandon(self) -> None:
        """Drop the step's gradients, and those in buckets, after a backward that raised."""
        self.drop()

    def step_taken(self) -> None:
        """Begin a new step: the optimizer has used the gradients."""

    def put_back(self, at: int) -> None:
        """Let a layer take effect again, where another library has put back what it had found."""
        layer = self.layers[at]
        if layer.above() is None:
            layer.remove()
            self.layers[at] = Layer(layer.owner, layer.name, layer.around)

    def detach(self) -> None:
        """Leave the optimizer to stock, which divides none of the gradients that have come."""
        if self.holds_local and self.divisor != 1:
            divide(self.local(), self.divisor)
        for layer in self.layers:
            layer.remove()

    # --- Local gradients --------------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        """Return the optimizer's parameters, in an order that is the same on all ranks."""
        return []

    def begin_local(self) -> None:
        """Expect backwards whose gradients stay on the parameters, until `end_local`."""
        self.holds_local = True
        self._trained_before.clear()

    def note_trained(self) -> None:
        """Note which parameters train, as such a backward begins: they may be frozen after it."""
        self._trained_before.update(param for param in self.parameters() if param.requires_grad)

    def end_local(self) -> None:
        """Expect backwards that are reduced, unless the stage keeps those of micro steps local."""
        self.holds_local = False

    def trained(self) -> list[Any]:
        """Return the parameters that train now, or did in a backward that was noted."""
        before = self._trained_before
        return [param for param in self.parameters() if param.requires_grad or param in before]

    def have_local(self) -> list[bool]:
        """Return of each of them whether it has a local gradient."""
        return [param.grad is not None for param in self.trained()]

    def is_late(self) -> bool:
        """Whether the backward that runs has brought gradients that are not local any more."""
        return False

    def lacking(self, group: Any) -> set[Any] | None:
        """Return the parameters that have a local gradient on another rank alone. A collective.

        DeepSpeed's reducer leaves out what has no gradient, so ranks that differ in what they have
        would wait for each other in different collectives. None where no rank has a gradient. A
        rank that has all does not wait for what others tell.

        group: the process group of the ranks that share the gradients.
        """
        here = self.have_local()
        alone = dist.get_world_size(group) == 1
        told = on_any(here, group) if here and not alone else None
        if here and all(here):
            return set()
        anywhere = here if told is None else told.tolist()
        if not any(anywhere):
            return None
        found = zip(self.trained(), here, anywhere, strict=True)
        return {param for param, one, any_ in found if any_ and not one}

    def reduce_local(self, lacking: set[Any]) -> None:
        """Add the local gradients, and zeros for `lacking`, to those of the step. A collective."""

    def drop_local(self) -> None:
        """Forget them, and leave the optimizer as it is before a backward."""


@torch.no_grad()
def divide(gradients: list[torch.Tensor], divisor: float) -> None:
    """Divide gradients in their memory; one that is no block of it, as an expanded one, moves."""
    blocks = [gradient for gradient in gradients if gradient.is_contiguous()]
    if blocks:
        torch._foreach_div_(blocks, divisor)
    for gradient in gradients if len(blocks) < len(gradients) else ():
        if not gradient.is_contiguous():
            gradient.data = gradient.data / divisor
