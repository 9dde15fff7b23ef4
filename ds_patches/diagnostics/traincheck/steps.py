"""Which parameters an optimizer steps with a gradient.

The gradients are read in a pre-hook of the PyTorch optimizer that DeepSpeed steps with. It sees
them as they are used: after the reduction, unscaled and clipped, in every stage and every release,
and it is not called for a step that overflow skips. Comparing parameters before and after would
take their memory, and weight decay moves them without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.diagnostics.traincheck.trainable import Trainable
from ds_patches.upstream import fragments


class Steps:
    """The steps of one DeepSpeed optimizer, while `watched`.

    deaf: no hook hears the backwards, or they began before.
    """

    def __init__(self, optimizer: Any, params: Sequence[Trainable], deaf: bool) -> None:
        self._optimizer = optimizer
        self._deaf = deaf
        self._slices = fragments.slices(optimizer)
        self._params = {id(param.param): param for param in params}
        self._before: dict[int, list[float]] = {}
        self._unchanged: set[int] = set()
        self._stepped = False
        self.taken = self.skipped = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        params = self._params.values()
        with ExitStack() as block:
            for inner in fragments.torch_optimizers(self._optimizer):
                block.callback(inner.register_step_pre_hook(self._read).remove)
            block.callback(Layer(self._optimizer, "step", self._step).remove)
            for param in params:
                block.callback(param.param.register_hook(param.arrived).remove)
            self._before = self._fingerprints()
            yield
        is_deaf = self._deaf or not any(param.came for param in params)
        is_taken = fragments.reads_parameter_gradients(self._optimizer)
        for key, param in self._params.items():
            param.held = key in self._slices
            param.came = (param.came or is_deaf) and (is_taken or not param.left)

    def _step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Around the optimizer's, of this one instance."""
        self._stepped = False
        grads = ((key, param.param.grad) for key, param in self._params.items())
        for key in _nonzero((key, grad) for key, grad in grads if grad is not None):
            self._params[key].left = True
        # Here, as the step unscales and clips in place.
        now = self._fingerprints()
        self._unchanged = {key for key, value in now.items() if value == self._before.get(key)}
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
            where = self._slices[key]
            if (grad := grads.get(id(where.stepped))) is not None:
                flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
                parts.append((key, flat.narrow(0, where.start, where.length)))
        for key in _nonzero(parts):
            if key in self._unchanged:
                self._params[key].stale = True
            else:
                self._params[key].trained = True

    @torch.no_grad()
    def _fingerprints(self) -> dict[int, list[float]]:
        """Tell gradients that stay in place over a step from those of before, without a copy."""
        params = [param.param for param in self._params.values()]
        kept = fragments.uncleared_gradients(self._optimizer, params, self._slices)
        pairs = [torch.stack([g.sum(dtype=torch.float32), g.norm().float()]) for g in kept.values()]
        return dict(zip(kept, torch.stack(pairs).tolist() if pairs else [], strict=True))


@torch.no_grad()
def _nonzero(grads: Iterable[tuple[int, Any]]) -> set[int]:
    """Return the keys of tensors with any element that is not zero; waits for a device once."""
    nonzero = {key: grad.any() for key, grad in grads}
    values = torch.stack([*nonzero.values()]).tolist() if nonzero else []
    return {key for key, value in zip(nonzero, values, strict=True) if value}
