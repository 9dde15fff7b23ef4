"""What eager code sees of partitioned parameters: against plain autograd, on full ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_patches.dc_fallback.uses import Calls
from tests.dc_fallback import partitioned as models
from tests.dc_fallback.partitioned import MODELS, Partitioned, See, equal


def hold(there: Partitioned, model: Any, stays: bool = False, **more: Tensor) -> list[str]:
    """The loss and all gradients are those of autograd; `more`: of what is not used as well.

    Returns the names of those that autograd has gradients of.
    """
    x, again = there.x.clone().requires_grad_(), there.x.clone().requires_grad_()
    expected_loss, expected = there.plain(model, again)
    loss = there.forward(model, x)
    assert stays or there.alive == 0, "gathered memory outlives the forward"
    there.backward(loss)
    assert there.alive == 0, "gathered memory outlives the backward"
    assert torch.equal(loss, expected_loss)
    assert equal(there.grads(), expected | more)
    assert torch.equal(x.grad, again.grad)
    return sorted(expected)


@pytest.mark.parametrize("model", [*MODELS, models.embeds])
def test_gradients_are_those_of_autograd(model: Any) -> None:
    there = Partitioned()
    hold(there, model)
    assert all(param.grad is None and param.numel() == 0 for param in there.params.values())


def test_a_view_of_another_dtype_is_kept_as_it_is() -> None:
    """The notes are in strides of the parameter."""
    hold(Partitioned(), models.seen_as_complex, stays=True)


@pytest.mark.parametrize("model", MODELS)
def test_alive_can_tell(model: Any) -> None:
    """Without the hooks autograd keeps what was gathered."""
    there = Partitioned()
    with there.call():
        loss = model(there.see, there.call, there.x.clone().requires_grad_())
    assert there.alive > 0
    del loss
    assert there.alive == 0


def halves_it(see: See, call: Any, x: Tensor) -> Tensor:
    """Code that writes to a parameter before it uses it."""
    weight = see("a")
    with torch.no_grad():
        weight.mul_(0.5)
    return (x @ weight).square().sum()


def test_one_that_was_written_to_is_kept() -> None:
    """A gather would bring what it was before."""
    there = Partitioned()
    x = there.x.clone().requires_grad_()
    there.backward(there.forward(halves_it, x))
    weight = 0.5 * there.values["a"]
    assert torch.allclose(x.grad, 2 * (there.x @ weight) @ weight.T)


def test_a_frozen_one_gets_no_gradient() -> None:
    assert hold(Partitioned(frozen=["a"]), models.calls_in_a_row) == ["b", "bias"]


def test_one_that_is_here_is_not_gathered() -> None:
    there = Partitioned(here=["a"])
    assert "a" in hold(there, models.calls_in_a_row)
    assert there.gathered() == "bias bias bias b b"


# --- how often is gathered ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [
        (models.read_often, "a", "a"),
        (models.calls_in_a_row, "a bias a bias a bias b", "b a a a"),  # of the bias, nothing
        (models.without_and_with, "a", "a"),
        (models.with_and_without, "a", "a"),
        (models.embeds, "a", ""),
    ],
)
def test_one_gather_per_call_and_parameter(model: Any, forward: str, backward: str) -> None:
    there = Partitioned()
    loss = there.forward(model, there.x.requires_grad_())
    assert there.gathered() == forward
    assert there.uses.gathered_any
    grads = []
    for _ in range(2):  # a second one begins anew
        there.backward(loss, retain_graph=True)
        assert there.gathered() == backward
        assert there.alive == 0
        grads.append(there.grads())
    assert equal(*grads)


@pytest.mark.parametrize("frozen", [[], ["a"]])
def test_the_backward_holds_one_call_at_a_time(frozen: list[str]) -> None:
    there, most = Partitioned(frozen), 0

    def watched(grad: Tensor) -> None:
        nonlocal most
        most = max(most, there.alive)

    def model(see: See, call: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            with call():
                x = torch.tanh(x @ see("a"))
                x.register_hook(watched)
        return x.sum()

    there.backward(there.forward(model, there.x.clone().requires_grad_()))
    assert there.gathered() == "a a a a a a"
    assert most <= 1


def test_the_backward_lets_go_of_what_it_is_done_with() -> None:
    there, alive = Partitioned(), []

    def model(see: See, call: Any, x: Tensor) -> Tensor:
        x = torch.tanh(x @ see("a"))
        x.register_hook(lambda grad: alive.append(there.alive))  # between the two uses
        return (x @ see("b")).sum()

    there.backward(there.forward(model, there.x.clone().requires_grad_()))
    assert there.gathered() == "a b b a"
    assert alive == [0]


def test_after_a_backward_that_raised_nothing_stays() -> None:
    def refuse(grad: Tensor) -> None:
        raise RuntimeError("refused")

    def model(see: See, call: Any, x: Tensor) -> Tensor:
        w = see("a")
        w.register_hook(refuse)  # behind the node that asked for the values
        return (x @ w).sum()

    there = Partitioned()
    loss = there.forward(model, there.x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="refused"):
        loss.backward(retain_graph=True)
    assert there.alive == 1
    there.uses.forget_backward()
    assert there.alive == 0
    assert there.delivered == []


# --- leaf modules ---------------------------------------------------------------------------------


def test_of_a_unit_all_are_gathered_and_delivered() -> None:
    there = Partitioned(frozen=["bias"], unit=["c", "b", "a", "bias"])
    hold(there, models.transposed, c=torch.zeros_like(there.values["c"]))
    assert there.gathered() == "c+b+a+bias c+b+a+bias", "forward and backward"


def test_of_a_unit_one_that_is_thawed_is_delivered_from_the_next_forward_on() -> None:
    there = Partitioned(frozen=["c"], unit=["a", "b", "c"])
    there.backward(there.forward(models.transposed, there.x))
    assert sorted(there.grads()) == ["a", "b"]
    there.params["c"].requires_grad_()
    there.backward(there.forward(models.transposed, there.x))
    assert sorted(there.grads()) == ["a", "b", "c"]


def test_of_a_unit_those_that_are_here_are_not_gathered() -> None:
    there = Partitioned(unit=["a", "b"], here=["b"])
    hold(there, models.transposed)
    assert there.gathered() == "a a+b"


# --- calls ----------------------------------------------------------------------------------------


def test_a_call_ends_with_those_within_it() -> None:
    calls = Calls()
    outer, within, again, raised = (calls.open(name) for name in ("a", "b", "a", "c"))
    assert calls.close("never opened") == calls.cut(4) == []
    assert calls.cut(3) == [raised]
    assert calls.close("a") == [again], "a module that calls itself"
    assert calls.innermost == within
    assert calls.close("a") == [outer, within]
    assert not calls


def test_gradients_after_a_call_that_raised() -> None:
    there = Partitioned()

    def raises(see: See, call: Any, x: Tensor) -> Tensor:
        with call(), call():
            (x @ see("a")).sum()
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        there.forward(raises, there.x)
    assert len(there.uses.calls) == 3
    there.uses.close(there.uses.calls.cut(0))
    assert (len(there.uses.calls), there.alive) == (0, 0)
    hold(there, models.nested)


def test_param_of() -> None:
    there = Partitioned()
    with there.call():
        seen = there.see("a")
        there.see("b")
        for tensor in (seen, seen.t(), seen[1], seen.detach(), seen.view(16)):
            assert there.uses.param_of(tensor) is there.params["a"]
        assert there.uses.param_of(seen * 1) is None
        assert there.uses.param_of(there.x) is None
        assert there.uses.param_of(there.params["a"]) is None
    assert there.uses.param_of(seen) is None, "its call has ended"
