"""Stage 1 with bf16 parameters and fp32 gradients: the optimizer adds up by itself."""

from __future__ import annotations

from typing import Any

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import engine as upstream_engine


class Bf16Sum(GradientSum):
    """The fp32 gradients of one ``BF16_Optimizer`` over the backwards of a step.

    Every backward's epilogue adds the bf16 gradients to them, every prologue clears the bf16 ones:
    what is left to do is to forget, and up to 0.18.9 to add before the sum is reduced.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._added = False  # the running backward's, before its epilogue
        super().__init__()
        if upstream_engine.reduces_before_it_adds():
            self.layers = [
                Layer(engine, "allreduce_gradients", self._reduce),
                Layer(engine.optimizer, "backward_epilogue", self._epilogue),
            ]

    def lacks(self, unreduced: bool) -> bool:
        return unreduced

    def drop(self) -> None:
        self._optimizer.clear_lp_grads()
        self._optimizer.clear_hp_grads()

    def _reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        self._optimizer.backward_epilogue()
        self._added = True
        wrapped(*args, **kwargs)

    def _epilogue(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if not self._added:
            wrapped(*args, **kwargs)
        self._added = False
