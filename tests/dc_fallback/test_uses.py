"""What eager code sees of partitioned parameters: against plain autograd, on full ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_patches.dc_fallback.units import Calls
from tests.dc_fallback.partitioned import (
    MODELS,
    Partitioned,
    See,
    calls_in_a_row,
    equal,
    nested,
    read_often,
    seen_as_complex,
    transposed,
    with_and_without,
    without_and_with,
)


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


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_autograd(model: Any) -> None:
    there = Partitioned()
    hold(there, model)
    assert all(param.grad is None and param.numel() == 0 for param in there.params.values())


def test_a_view_of_another_dtype_is_kept_as_it_is() -> None:
    """The notes are in strides of the parameter."""
    hold(Partitioned(), seen_as_complex, stays=True)


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
    assert hold(Partitioned(frozen=["a"]), calls_in_a_row) == ["b", "bias"]


def test_one_that_is_here_is_not_gathered() -> None:
    there = Partitioned(here=["a"])
    assert "a" in hold(there, calls_in_a_row)
    assert not any("a" in names for names in there.gathers)


# --- how often is gathered ------------------------------------------------------------------------


def test_one_gather_per_call_and_parameter() -> None:
    there = Partitioned()
    there.forward(read_often, there.x)
    assert there.gathers == [["a"]]
    there.gathers.clear()
    there.forward(calls_in_a_row, there.x)
    assert there.gathers == [["a"], ["bias"]] * 3 + [["b"]]
    assert there.uses.gathered_any


@pytest.mark.parametrize("model", [without_and_with, with_and_without])
def test_one_gather_with_gradients_and_without(model: Any) -> None:
    there = Partitioned()
    there.forward(model, there.x)
    assert there.gathers == [["a"]]


def test_the_backward_gathers_what_was_saved() -> None:
    there = Partitioned()
    loss = there.forward(calls_in_a_row, there.x.requires_grad_())
    there.gathers.clear()
    there.backward(loss, retain_graph=True)
    assert there.gathers == [["b"], ["a"], ["a"], ["a"]], "once a call; of the bias, nothing"
    once = there.grads()
    there.gathers.clear()
    there.backward(loss)
    assert there.gathers == [["b"], ["a"], ["a"], ["a"]], "a second backward begins anew"
    assert equal(there.grads(), once)
    assert there.alive == 0


def test_the_backward_gathers_once_what_a_call_read_often() -> None:
    there = Partitioned()
    loss = there.forward(read_often, there.x.requires_grad_())
    there.gathers.clear()
    there.backward(loss)
    assert there.gathers == [["a"]]


def test_the_backward_of_an_embedding_gathers_nothing() -> None:
    def embeds(see: See, call: Any, x: Tensor) -> Tensor:
        return F.embedding(torch.tensor([1, 3, 3]), see("a")).square().sum() + x.sum()

    there = Partitioned()
    hold(there, embeds)
    assert there.gathers == [["a"]]


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
    assert len(there.gathers) == 6
    assert most <= 1


def test_the_backward_lets_go_of_what_it_is_done_with() -> None:
    there, alive = Partitioned(), []

    def model(see: See, call: Any, x: Tensor) -> Tensor:
        x = torch.tanh(x @ see("a"))
        x.register_hook(lambda grad: alive.append(there.alive))  # between the two uses
        return (x @ see("b")).sum()

    there.backward(there.forward(model, there.x.clone().requires_grad_()))
    assert there.gathers == [["a"], ["b"], ["b"], ["a"]]
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
    hold(there, transposed, c=torch.zeros_like(there.values["c"]))
    assert there.gathers == [["c", "b", "a", "bias"]] * 2, "forward and backward"


def test_of_a_unit_one_that_is_thawed_is_delivered_from_the_next_forward_on() -> None:
    there = Partitioned(frozen=["c"], unit=["a", "b", "c"])
    there.backward(there.forward(transposed, there.x))
    assert sorted(there.grads()) == ["a", "b"]
    there.params["c"].requires_grad_()
    there.backward(there.forward(transposed, there.x))
    assert sorted(there.grads()) == ["a", "b", "c"]


def test_of_a_unit_those_that_are_here_are_not_gathered() -> None:
    there = Partitioned(unit=["a", "b"], here=["b"])
    hold(there, transposed)
    assert there.gathers[0] == ["a"]


# --- calls ----------------------------------------------------------------------------------------


def test_the_call_that_ends_takes_along_those_within_it_that_raised() -> None:
    there = Partitioned()
    outer, inner, innermost = "outer", "inner", "innermost"
    for module in (outer, inner, innermost):
        there.uses.calls.open(module)
        there.see("a")
    assert there.alive == 3
    ended = there.uses.close(there.uses.calls.close(inner))
    assert [call.module for call in ended] == [inner, innermost]
    assert len(there.uses.calls) == 1
    assert there.alive == 1
    assert there.uses.calls.innermost.module == outer
    there.uses.close(there.uses.calls.close(outer))
    assert len(there.uses.calls) == 0
    assert there.alive == 0


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
    hold(there, nested)


def test_cut_leaves_the_outermost() -> None:
    calls = Calls()
    opened = [calls.open(name) for name in "abcd"]
    assert calls.cut(2) == opened[2:]
    assert (len(calls), calls.innermost) == (2, opened[1])
    assert calls.cut(2) == []


def test_a_module_that_calls_itself_ends_its_innermost_call() -> None:
    calls = Calls()
    outer, inner = calls.open("a"), calls.open("a")
    assert calls.close("a") == [inner]
    assert calls.close("never opened") == []
    assert calls.close("a") == [outer]


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
