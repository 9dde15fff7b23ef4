"""Which parameters an optimizer steps with a gradient.

The gradients are read in a pre-hook of the PyTorch optimizer that DeepSpeed steps with. It sees
them as they are used: after the reduction, unscaled and clipped, in every stage and every release,
and it is not called for a step that overflow skips. Comparing parameters before and after would
take their memory, and weight decay moves them without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.upstream import stepped


class Steps:
    """The steps of one DeepSpeed optimizer, while `watched`.

    What it finds are ids of parameters, as this rank sees them. `held`: it steps at least a part of
    them. `trained`: stepped with a gradient. `stale`: with one of the same sums as the one that had
    been there before. `left`: one lay on the parameter when the step began, which is fine where the
    step takes it from there. `came`: a backward had one for it that was taken, or nobody knows,
    as where this is `deaf`, or begins after the backwards.
    """

    def __init__(self, optimizer: Any, params: Sequence[Tensor], deaf: bool) -> None:
        self._optimizer = optimizer
        self._deaf = deaf
        self._params: Sequence[Any] = params
        self._slices = stepped.slices(optimizer)
        self._before: dict[int, list[float]] = {}
        self._unchanged: set[int] = set()
        self._stepped = False
        self.taken = self.skipped = 0
        self.held = set(self._slices)
        self.trained: set[int] = set()
        self.stale: set[int] = set()
        self.came: set[int] = set()
        self.left: set[int] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as block:
            for inner in stepped.stepping(self._optimizer):
                block.callback(inner.register_step_pre_hook(self._read).remove)
            block.callback(Layer(self._optimizer, "step", self._step).remove)
            for param in self._params:
                hook = partial(self._note, id(param))
                block.callback(param.register_hook(hook).remove)
            self._before = self._fingerprints()
            yield
        if self._deaf or not self.came:
            self.came = {id(param) for param in self._params}
        if not stepped.takes_from_parameters(self._optimizer):
            self.came -= self.left

    def _note(self, key: int, _: Tensor) -> None:
        self.came.add(key)

    @torch.no_grad()
    def _begin(self) -> None:
        self._stepped = False
        there = [param for param in self._params if param.grad is not None]
        self.left |= _nonzero((id(param), param.grad) for param in there)
        # Here, as the step unscales and clips in place.
        now = self._fingerprints()
        self._unchanged = {key for key, value in now.items() if value == self._before.get(key)}

    def _step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Around the optimizer's, of this one instance."""
        self._begin()
        result = step(*args, **kwargs)
        self.taken += self._stepped
        self.skipped += not self._stepped
        self._before = self._fingerprints()
        return result

    @torch.no_grad()
    def _read(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped = True
        by_param = {id(p): p.grad for group in inner.param_groups for p in group["params"]}
        found = []
        for key, where in self._slices.items():
            grad = by_param.get(id(where.stepped))
            if grad is not None:
                flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
                found.append((key, flat.narrow(0, where.start, where.length)))
        nonzero = _nonzero(found)
        self.stale |= nonzero & self._unchanged
        self.trained |= nonzero - self._unchanged

    @torch.no_grad()
    def _fingerprints(self) -> dict[int, list[float]]:
        """Tell gradients that stay in place over a step from those of before, without a copy."""
        kept = stepped.kept(self._optimizer, self._params, self._slices)
        pairs = [torch.stack([g.sum(dtype=torch.float32), g.norm().float()]) for g in kept.values()]
        return dict(zip(kept, torch.stack(pairs).tolist() if pairs else [], strict=True))


def _nonzero(gradients: Iterable[tuple[int, Any]]) -> set[int]:
    """Return the keys of tensors with any element that is not zero; waits for a device once."""
    found = [(key, gradient.any()) for key, gradient in gradients]
    values = torch.stack([value for _, value in found]).tolist() if found else []
    return {key for (key, _), value in zip(found, values, strict=True) if value}
