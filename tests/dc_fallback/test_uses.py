"""Eager code on partitioned parameters, against plain autograd on full ones."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ds_patches.dc_fallback.dynamo import SavedTensorsHooks
from ds_patches.dc_fallback.uses import Calls, Uses
from tests.harness.views import VIEWS

See = Callable[[str], Tensor]
Names = Sequence[str]
SHAPES = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "bias": (4,)}


class Partitioned:
    """Parameters without elements, and their values elsewhere.

    unit: names of those below one leaf module. whole: names of those that somebody has gathered.
    """

    def __init__(self, frozen: Names = (), unit: Names = (), whole: Names = ()) -> None:
        torch.manual_seed(3)
        self.values = {name: torch.randn(s, dtype=torch.float64) for name, s in SHAPES.items()}
        self.x = torch.randn(3, 4, dtype=torch.float64)
        self.params = {
            name: Parameter(value if name in whole else value.new_empty(0), name not in frozen)
            for name, value in self.values.items()
        }
        self._names = {param: name for name, param in self.params.items()}
        self._gathers: list[str] = []
        self._memory: list[weakref.ref[Any]] = []
        self._delivered: list[tuple[str, Tensor]] = []
        self.uses = Uses(
            self._gather,
            lambda param, grad: self._delivered.append((self._names[param], grad.clone())),
            lambda param: self.values[self._names[param]].shape,
            lambda param: self._names[param] in whole,
            [[self.params[name] for name in unit]],
        )
        self._saving = SavedTensorsHooks(self.uses.pack, self.uses.unpack)

    def _gather(self, params: Sequence[Parameter]) -> list[Tensor]:
        arrays = [self.values[self._names[param]].numpy().copy() for param in params]
        self._gathers.append("+".join(self._names[param] for param in params))
        self._memory += map(weakref.ref, arrays)  # the storage keeps an array, nobody else does
        return [torch.from_numpy(array) for array in arrays]

    def gathered(self) -> str:
        """Return the gathers since the last call, in order; a unit is one."""
        names = " ".join(self._gathers)
        self._gathers.clear()
        return names

    @property
    def alive(self) -> int:
        return sum(array() is not None for array in self._memory)

    @contextmanager
    def call(self) -> Iterator[None]:
        module = object()
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
        """Return the gradients delivered since the last call, each once."""
        grads = dict(self._delivered)
        assert len(grads) == len(self._delivered), "delivered more than once"
        self._delivered.clear()
        return grads

    def hold(self, model: Any, stays: bool = False, **unused: Tensor) -> None:
        """Loss and gradients are those of autograd, and zeros for what a unit does not use."""
        x, again = self.x.clone().requires_grad_(), self.x.clone().requires_grad_()
        full = {
            name: value.clone().requires_grad_(self.params[name].requires_grad)
            for name, value in self.values.items()
        }
        expected = model(full.__getitem__, nullcontext, again)
        expected.backward()
        loss = self.forward(model, x)
        assert stays or self.alive == 0, "gathered memory outlives the forward"
        self.backward(loss)
        assert self.alive == 0, "gathered memory outlives the backward"
        grads = {name: param.grad for name, param in full.items() if param.grad is not None}
        assert torch.equal(loss, expected)
        # But for the order in which the uses of one parameter are summed up.
        torch.testing.assert_close(self.grads(), grads | unused, rtol=1e-12, atol=1e-12)
        assert torch.equal(x.grad, again.grad)


# --- models: of what shows a parameter, what opens a call, and the input --------------------------


def calls_in_a_row(see: See, call: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        with call():
            x = torch.tanh(F.linear(x, see("a"), see("bias")))
    with call():
        return (x @ see("b")).square().sum()


def nested(see: See, call: Any, x: Tensor) -> Tensor:
    x = x @ see("a")
    with call():
        x = torch.tanh(x @ see("a")) @ see("b")
    return (x @ see("a")).square().sum()


def transposed(see: See, call: Any, x: Tensor) -> Tensor:
    return torch.tanh(x.sin() @ see("a").t()).sum() + (x @ see("b").t()).square().sum()


def with_and_without(see: See, call: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = see("a").abs().sum()
    return (x @ see("a")).square().sum() / scale


@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [
        (calls_in_a_row, "a bias a bias a bias b", "b a a a"),  # of the bias, nothing
        (with_and_without, "a", "a"),
        (nested, "a a b", "a b a a"),
        (transposed, "a b", "b a"),
    ],
)
def test_gradients_and_how_often_is_gathered(model: Any, forward: str, backward: str) -> None:
    Partitioned().hold(model)
    params = Partitioned()
    loss = params.forward(model, params.x.requires_grad_())
    assert params.gathered() == forward
    grads = []
    for _ in range(2):  # a second one begins anew
        params.backward(loss, retain_graph=True)
        assert params.gathered() == backward
        grads.append(params.grads())
    torch.testing.assert_close(*grads)


def test_gradients_of_views() -> None:
    """Views whose values a gather does not bring stay in memory."""
    stays = ("negated", "conjugated", "bits")
    for name, function in VIEWS.items():

        def model(see: See, call: Any, x: Tensor, function: Any = function) -> Tensor:
            with call():
                return function(see("a")).sum() + (x @ see("a")).square().sum()

        Partitioned().hold(model, stays=name in stays)


def test_one_that_was_written_to_is_kept() -> None:
    """A gather would bring what it was before."""

    def halves_it(see: See, call: Any, x: Tensor) -> Tensor:
        weight = see("a")
        with torch.no_grad():
            weight.mul_(0.5)
        return (x @ weight).square().sum()

    params = Partitioned()
    x = params.x.clone().requires_grad_()
    params.backward(params.forward(halves_it, x))
    weight = 0.5 * params.values["a"]
    torch.testing.assert_close(x.grad, 2 * (params.x @ weight) @ weight.T)


@pytest.mark.parametrize("frozen", [[], ["a"]])
@pytest.mark.parametrize("calls", [True, False], ids=["calls", "one call"])
def test_the_backward_holds_one_at_a_time(frozen: list[str], calls: bool) -> None:
    params, alive = Partitioned(frozen), []

    def model(see: See, call: Any, x: Tensor) -> Tensor:
        for name in "aaa" if calls else "abc":
            with call() if calls else nullcontext():
                x = torch.tanh(x @ see(name))
                x.register_hook(lambda grad: alive.append(params.alive))  # between the uses
        return x.sum()

    params.backward(params.forward(model, params.x.clone().requires_grad_()))
    assert params.gathered() == ("a a a a a a" if calls else "a b c c b a")
    assert max(alive) <= 1
    assert calls or alive == [0, 0, 0]


def test_a_frozen_one_gets_no_gradient_until_it_is_thawed() -> None:
    params = Partitioned(frozen=["a"], unit=["a", "b"])
    params.hold(transposed)
    params.params["a"].requires_grad_()
    params.hold(transposed)


def test_of_a_unit_all_are_delivered_and_those_gathered_that_are_not_here() -> None:
    params = Partitioned(frozen=["bias"], unit=["c", "b", "a", "bias"], whole=["b"])
    params.hold(transposed, c=torch.zeros_like(params.values["c"]))
    assert params.gathered() == "c+a+bias c+b+a+bias", "forward and backward"


def test_param_of() -> None:
    params = Partitioned()
    with params.call():
        seen = params.see("a")
        for tensor, param in ((seen[1].t(), params.params["a"]), (seen * 1, None)):
            assert params.uses.param_of(tensor) is param
    assert params.uses.param_of(seen) is None, "its call has ended"


def test_a_call_ends_with_those_within_it() -> None:
    calls = Calls()
    outer, within, again, raised = (calls.open(name) for name in ("a", "b", "a", "c"))
    assert calls.close("never opened") == calls.truncate(4) == []
    assert calls.truncate(3) == [raised]
    assert calls.close("a") == [again], "a module that calls itself"
    assert calls == [outer, within]
    assert calls.close("a") == [outer, within]
    assert not calls
