"""Stage 1 with bf16 parameters and fp32 gradients: ``BF16_Optimizer`` adds up by itself."""

from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import engine as upstream_engine


class Bf16Sum(GradientSum):
    """The fp32 gradients of one ``BF16_Optimizer`` over the backwards of a step.

    Every backward's epilogue adds the bf16 gradients to the fp32 ones, and every prologue clears
    the bf16 ones. This class divides the sum, drops it, and up to 0.18.9 adds the last backward
    before the sum is reduced.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._has_added = False  # the running backward's gradients, before its epilogue
        super().__init__(holds_local=True)
        if upstream_engine.has_torch_style_backward(engine):
            self.layers.append(Layer(engine, "allreduce_gradients", self._reduce))
        if upstream_engine.reduces_before_it_adds():
            self.layers.append(Layer(engine.optimizer, "backward_epilogue", self._epilogue))

    def parameters(self) -> list[Any]:
        return [param for group in self._optimizer.bf16_groups for param in group]

    def local_gradients(self) -> list[torch.Tensor]:
        return [sum_ for sum_ in self._optimizer.fp32_groups_gradients_flat if sum_.numel()]

    def lacks_gradients(self, has_unreduced: bool) -> bool:
        return has_unreduced

    def drop(self) -> None:
        self._optimizer.clear_lp_grads()
        self._optimizer.clear_hp_grads()

    def _reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if upstream_engine.reduces_before_it_adds():
            self._optimizer.backward_epilogue()
            self._has_added = True
        if self._engine.is_gradient_accumulation_boundary():
            self.set_divisor(1)
        wrapped(*args, **kwargs)

    def _epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if not self._has_added:
            wrapped(*args, **kwargs)
        self._has_added = False
