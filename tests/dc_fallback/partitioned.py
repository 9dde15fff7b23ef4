"""Parameters without elements, seen through `Uses`, and code that reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ds_patches.dc_fallback.dynamo import SavedTensorsHooks
from ds_patches.dc_fallback.uses import Uses

See = Callable[[str], Tensor]

_EMPTY = torch.empty(0, dtype=torch.float64)


class Partitioned:
    """Parameters without elements, and their values elsewhere.

    unit: names of those below one leaf module. `here`: names of those that somebody has gathered.
    """

    def __init__(
        self, frozen: Sequence[str] = (), unit: Sequence[str] = (), here: Sequence[str] = ()
    ) -> None:
        random = partial(
            torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "bias": (4,)}
        self.values = {name: random(shape) for name, shape in shapes.items()}
        self.x = random((3, 4))
        self.params = {
            name: Parameter(value if name in here else _EMPTY, name not in frozen)
            for name, value in self.values.items()
        }
        self._names = {param: name for name, param in self.params.items()}
        self.gathers: list[str] = []
        self._memory: list[weakref.ref[Any]] = []
        self.delivered: list[tuple[str, Tensor]] = []
        self.uses = Uses(
            self.gather,
            lambda param, grad: self.delivered.append((self._names[param], grad.clone())),
            lambda param: self.values[self._names[param]].shape,
            lambda param: self._names[param] in here,
            [[self.params[name] for name in unit]],
        )
        self._saving = SavedTensorsHooks(self.uses.pack, self.uses.unpack)

    def gather(self, params: Sequence[Parameter]) -> list[Tensor]:
        names = [self._names[param] for param in params]
        self.gathers.append("+".join(names))
        return [self._full(name) for name in names]

    def gathered(self) -> str:
        """What was gathered since the last time, in order; a unit is one."""
        found = " ".join(self.gathers)
        self.gathers.clear()
        return found

    def _full(self, name: str) -> Tensor:
        array = self.values[name].numpy().copy()
        self._memory.append(weakref.ref(array))  # the storage keeps the array, nobody else does
        return torch.from_numpy(array)

    @property
    def alive(self) -> int:
        """How many gathered storages have not been freed."""
        return sum(array() is not None for array in self._memory)

    @contextmanager
    def call(self, module: Any = None) -> Iterator[None]:
        module = module or object()
        self.uses.calls.open(module)
        yield
        self.uses.close(self.uses.calls.close(module))

    def see(self, name: str) -> Tensor:
        seen = self.uses.cached(self.params[name])
        return self.uses.use(self.params[name]) if seen is None else seen

    def forward(self, model: Callable[..., Tensor], x: Tensor) -> Tensor:
        with self._saving, self.call():
            return model(self.see, self.call, x)

    def backward(self, loss: Tensor, **how: Any) -> None:
        loss.backward(**how)
        self.uses.forget_backward()

    def grads(self) -> dict[str, Tensor]:
        """What was delivered since the last time, each once."""
        grads = dict(self.delivered)
        assert len(grads) == len(self.delivered), "delivered more than once"
        self.delivered.clear()
        return grads

    def plain(self, model: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the gradients of the full values."""
        full = {
            name: value.clone().requires_grad_(self.params[name].requires_grad)
            for name, value in self.values.items()
        }
        loss = model(full.__getitem__, nullcontext, x)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in full.items() if p.grad is not None}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """But for the order in which the uses of one parameter are summed up."""
    return found.keys() == expected.keys() and all(
        found[name].shape == expected[name].shape
        and torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-12)
        for name in expected
    )


# --- models: of what shows a parameter, what opens a call, and the input --------------------------


def calls_in_a_row(see: See, call: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        with call():
            x = torch.tanh(F.linear(x, see("a"), see("bias")))
    with call():
        return (x @ see("b")).square().sum()


def read_often(see: See, call: Any, x: Tensor) -> Tensor:
    with call():
        for _ in range(4):
            x = torch.tanh(x @ see("a"))
        return x.sum()


def nested(see: See, call: Any, x: Tensor) -> Tensor:
    x = x @ see("a")
    with call():
        x = torch.tanh(x @ see("a")) @ see("b")
    return (x @ see("a")).square().sum()


def transposed(see: See, call: Any, x: Tensor) -> Tensor:
    return torch.tanh(x.sin() @ see("a").t()).sum() + (x @ see("b").t()).square().sum()


def a_row(see: See, call: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ see("a")[1]) * see("a")[2, 1:].sum()).sum() + (x * see("b")[3]).sum()


def viewed(see: See, call: Any, x: Tensor) -> Tensor:
    return (x.repeat(1, 4) * see("a").view(16)).sum() + (x @ see("b").view(2, 2, 4)[1].t()).sum()


def seen_as_complex(see: See, call: Any, x: Tensor) -> Tensor:
    """A filter, as in GFNet: one parameter with a last dimension of two."""
    y = torch.view_as_complex(x.sum(0).view(2, 2)) * torch.view_as_complex(see("a").view(4, 2, 2))
    return torch.view_as_real(torch.fft.fft(y)).square().sum()


def itself(see: See, call: Any, x: Tensor) -> Tensor:
    return (see("a") * see("a")).sum() + x.sum()


def without_and_with(see: See, call: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = see("a").abs().sum()
    return (x @ see("a")).square().sum() / scale


def with_and_without(see: See, call: Any, x: Tensor) -> Tensor:
    y = (x @ see("a")).square().sum()
    with torch.no_grad():
        scale = see("a").abs().sum()
    return y / scale


def embeds(see: See, call: Any, x: Tensor) -> Tensor:
    return F.embedding(torch.tensor([1, 3, 3]), see("a")).square().sum() + x.sum()


MODELS = [calls_in_a_row, read_often, nested, transposed, a_row, viewed, itself]
MODELS += [without_and_with, with_and_without]
