"""Records which parameters an optimizer steps with a gradient.

Gradients are read in a pre-hook of the PyTorch optimizer that DeepSpeed steps with: reduced,
unscaled and clipped, in every stage and release. The hook does not run in a step that is skipped
for overflow. Comparing parameters before and after a step would need a copy of them, and weight
decay changes them without a gradient.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.diagnostics.traincheck.trainable import Trainable
from ds_patches.upstream import fragments
from ds_patches.upstream.classes import ZERO3, class_of
from ds_patches.upstream.coverage import compiles_backward


class Steps:
    """The steps of an engine inside the block of `recorded`: how many, and of which parameters."""

    def __init__(self, engine: Any, params: Sequence[Trainable]) -> None:
        self._module, self._optimizer = engine.module, engine.optimizer
        # Hooks do not run in compiled backwards, and did not in those before the block.
        self._is_partial = (
            compiles_backward(engine)
            or engine.micro_steps % engine.gradient_accumulation_steps() != 0
        )
        self._slices = fragments.slices(self._optimizer)
        self._params = {id(param.param): param for param in params}
        self._before: dict[int, list[float]] = {}
        self._unchanged: set[int] = set()
        self._stepped = False
        self.taken = self.skipped = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        params = self._params.values()
        ran: set[nn.Module] = set()

        def record(module: nn.Module, _: Any) -> None:
            # Without this condition, Dynamo would trace the side effect, or break the graph.
            if not torch.compiler.is_compiling():
                ran.add(module)

        with ExitStack() as block:
            for module in self._module.modules():
                block.callback(module.register_forward_pre_hook(record).remove)
            for inner in fragments.torch_optimizers(self._optimizer):
                block.callback(inner.register_step_pre_hook(self._read).remove)
            block.callback(Layer(self._optimizer, "step", self._step).remove)
            for param in params:
                block.callback(param.param.register_hook(param.record_gradient).remove)
            self._before = self._fingerprints()
            yield
        is_partial = self._is_partial or not any(param.has_gradient for param in params)
        is_read = class_of(self._optimizer) != ZERO3  # else a step never reads `param.grad`
        for key, param in self._params.items():
            param.record_runs(ran)
            param.in_optimizer = key in self._slices
            has_gradient = param.has_gradient or is_partial
            param.has_gradient = has_gradient and (is_read or not param.keeps_grad)

    def _step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wrap `step` of this optimizer: compare its gradients with those of the last step."""
        self._stepped = False
        grads = ((key, param.param.grad) for key, param in self._params.items())
        for key in _nonzero((key, grad) for key, grad in grads if grad is not None):
            self._params[key].keeps_grad = True
        # Before the step, which unscales and clips in place.
        sums = self._fingerprints()
        self._unchanged = {key for key, value in sums.items() if value == self._before.get(key)}
        result = step(*args, **kwargs)
        self.taken += self._stepped
        self.skipped += not self._stepped
        self._before = self._fingerprints()
        return result

    @torch.no_grad()
    def _read(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped = True
        grads = {id(p): p.grad for group in inner.param_groups for p in group["params"]}
        parts = []
        for key in self._slices.keys() & self._params.keys():
            part = self._slices[key]
            if (grad := grads.get(id(part.stepped))) is not None:
                flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
                parts.append((key, flat.narrow(0, part.start, part.length)))
        for key in _nonzero(parts):
            if key in self._unchanged:
                self._params[key].is_stale = True
            else:
                self._params[key].trained = True

    @torch.no_grad()
    def _fingerprints(self) -> dict[int, list[float]]:
        """Return sum and norm of each gradient that stays in place over a step, by parameter id."""
        params = [param.param for param in self._params.values()]
        grads = fragments.uncleared_gradients(self._optimizer, params, self._slices)
        sums = [torch.stack([g.sum(dtype=torch.float32), g.norm().float()]) for g in grads.values()]
        return dict(zip(grads, torch.stack(sums).tolist() if sums else [], strict=True))


@torch.no_grad()
def _nonzero(grads: Iterable[tuple[int, Any]]) -> set[int]:
    """Return the keys of tensors with an element that is not zero; synchronizes once."""
    nonzero = {key: grad.any() for key, grad in grads}
    values = torch.stack([*nonzero.values()]).tolist() if nonzero else []
    return {key for key, value in zip(nonzero, values, strict=True) if value}
