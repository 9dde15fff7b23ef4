"""The sum of a step's gradients: the base class of `zero12_sum`, `zero3_sum` and `bf16_sum`."""

from typing import Any

import torch

from ds_patches.core.layer import Layer
from ds_patches.steps.ranks import any_rank


class GradientSum:
    """The gradients of one step, which a ZeRO stage adds up over the step's backwards.

    Each backward adds reduced gradients. In a block backwards leave local ones, which autograd adds
    up on the parameters, until `reduce_local` reduces them. Methods do nothing unless overridden.

    layers: wrappers of methods of this engine and its optimizer.
    """

    #: True while DeepSpeed itself calls zero_grad(), which is no request of the user.
    in_upstream_zero_grad = False
    #: True if the step may be taken without gradients, as with zeros: they were dropped, or a block
    #: brought none.
    takes_zeros = False
    #: True if zero_grad() right after ``engine.step()`` has counted a micro step drops nothing.
    keeps_earlier_micro_steps = True

    #: The divisor that the reduction applies to the gradients of the running backward.
    divisor = 1

    #: The attribute of a parameter that holds its local gradient.
    attribute = "grad"

    def __init__(self, holds_local: bool = False) -> None:
        """holds_local: the stage keeps gradients of micro steps local, also out of a block."""
        self.layers: list[Layer] = []
        #: True if the parameters may hold gradients of the step's earlier backwards.
        self.holds_local = self._always_holds_local = holds_local
        self._recorded_trainable: set[Any] = set()
        self._recorded_versions: list[tuple[int, int]] = []

    def set_divisor(self, divisor: int, is_held: bool = True) -> None:
        """Set the divisor by which the reduction divides the gradients of the backward that begins.

        Local gradients of earlier backwards are rescaled to the same divisor.

        is_held: the step has gradients of earlier backwards.
        """
        previous, self.divisor = self.divisor, divisor
        if previous != divisor and self.holds_local and is_held:
            divide(self.local_gradients(), previous / divisor)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients on the parameters, which are not reduced."""
        gradients = [getattr(param, self.attribute) for param in self.trainable()]
        return [gradient for gradient in gradients if gradient is not None]

    def begin_backward(self) -> None:
        """Prepare the sum for the gradients of a backward that begins."""

    def may_have_gradients(self) -> bool:
        """Return True if the backward that raised may have brought a gradient."""
        if self.has_nonlocal_gradients():
            return True
        return self.holds_local and self._recorded_versions != self._gradient_versions()

    def record_gradients(self) -> None:
        """Record the gradients on the parameters as a backward begins, for `may_have_gradients`."""
        self._recorded_versions = self._gradient_versions()

    def _gradient_versions(self) -> list[tuple[int, int]]:
        """Return ids and versions of the gradients on the parameters; any change changes them."""
        gradients = [getattr(param, self.attribute) for param in self.parameters()]
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def end_empty_backward(self, failed: bool = False) -> bool:
        """End a backward that brought no gradient: it raised, or reached no parameter.

        Return True to skip DeepSpeed's epilogue.
        """
        return False

    def lacks_gradients(self, has_unreduced: bool) -> bool:
        """Return True if a step has no gradients to use, as no backward ran at the boundary.

        has_unreduced: earlier micro steps have brought gradients.
        """
        return False

    def complete(self) -> None:
        """Complete the sum, before the optimizer reads it."""

    def drop(self) -> None:
        """Drop the step's gradients."""

    def drop_failed_backward(self) -> None:
        """Drop the step's gradients, and those in the buckets, after a backward that raised."""
        self.drop()

    def step_taken(self) -> None:
        """Begin a new step, after the optimizer has used the gradients."""

    def reinstall_layers(self) -> None:
        """Install layers again if another library has restored the methods beneath them."""
        for index, layer in enumerate(self.layers):
            is_on_top = layer.namespace.get(layer.name) is layer.installed  # without a call
            if not is_on_top and layer.above() is None:
                layer.remove()
                self.layers[index] = Layer(layer.owner, layer.name, layer.around)

    def detach(self) -> None:
        """Remove the layers. Divide the local gradients first, as DeepSpeed will not."""
        if self.holds_local and self.divisor != 1:
            divide(self.local_gradients(), self.divisor)
        for layer in self.layers:
            layer.remove()

    # --- Local gradients --------------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        """Return the optimizer's parameters, in the same order on all ranks."""
        return []

    def begin_local(self) -> None:
        """Expect backwards that leave their gradients on the parameters, until `end_local`."""
        self.holds_local = True
        self._recorded_trainable.clear()

    def record_trainable(self) -> None:
        """Record the trainable parameters of a local backward: they may be frozen after it."""
        self._recorded_trainable.update(param for param in self.parameters() if param.requires_grad)

    def end_local(self) -> None:
        """Expect backwards that reduce, unless the stage keeps gradients of micro steps local."""
        self.holds_local = self._always_holds_local

    def trainable(self) -> list[Any]:
        """Return the parameters that are trainable now, or were in a recorded backward."""
        recorded = self._recorded_trainable
        return [param for param in self.parameters() if param.requires_grad or param in recorded]

    def has_local_gradients(self) -> list[bool]:
        """Return, for each trainable parameter, True if it has a local gradient."""
        return [getattr(param, self.attribute) is not None for param in self.trainable()]

    def has_nonlocal_gradients(self) -> bool:
        """Return True if gradients of the running backward are in buckets or reduced."""
        return False

    def missing_params(self, group: Any) -> set[Any] | None:
        """Return the parameters that have a local gradient on other ranks only. Collective.

        None if no rank has a gradient. DeepSpeed's reducer skips parameters without a gradient, so
        ranks with gradients of different parameters would wait for each other in different
        collectives. A rank that has all gradients does not wait for the others' flags.

        group: the process group of the ranks that share the gradients.
        """
        local = self.has_local_gradients()
        if not local:
            return None
        on_any = any_rank(local, group)
        if all(local):
            return set()
        anywhere = on_any.tolist()
        if not any(anywhere):
            return None
        flags = zip(self.trainable(), local, anywhere, strict=True)
        return {param for param, is_local, is_anywhere in flags if is_anywhere and not is_local}

    def reduce_local(self, missing: set[Any]) -> None:
        """Reduce the local gradients, and zeros for `missing`, into the step's sum. Collective."""

    def drop_local(self) -> None:
        """Drop the local gradients, and reset the optimizer to its state before a backward."""


@torch.no_grad()
def divide(gradients: list[torch.Tensor], divisor: float) -> None:
    """Divide gradients in place. A gradient that is not contiguous gets new memory."""
    contiguous = [gradient for gradient in gradients if gradient.is_contiguous()]
    if contiguous:
        torch._foreach_div_(contiguous, divisor)
    for gradient in gradients if len(contiguous) < len(gradients) else ():
        if not gradient.is_contiguous():
            gradient.data = gradient.data / divisor
