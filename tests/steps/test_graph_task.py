"""Three fates of a run of the autograd engine, and the runs inside it: plain PyTorch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_patches.training.graph_task import (
    NO_TASK,
    Entry,
    TaskWatch,
    at_end_of_task,
    current_task_id,
)


class RaiseIf(torch.autograd.Function):
    """Identity; its backward raises if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.raises:
            raise RuntimeError("half way")
        return grad, None


class Watched:
    """Notes what each call of `enter` from inside a backward has met."""

    def __init__(self) -> None:
        self.watch = TaskWatch()
        self.met: list[Entry | None] = []  # None: the one that runs

    def at(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self.come)
        return tensor

    def come(self, grad: Tensor) -> None:
        is_known = self.watch.task_id == current_task_id()
        self.met.append(None if is_known else self.watch.enter())

    def loss(self, raises: bool = False) -> Tensor:
        return self.at(RaiseIf.apply(ready(), raises).sum())


def ready() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_one_backward_begins_once_and_runs_until_it_ends() -> None:
    watched, leaf = Watched(), ready()
    seen: list[tuple[bool, bool]] = []
    leaf.register_hook(lambda grad: seen.append((watched.watch.running, watched.watch.raised)))
    middle = watched.at(leaf * 2)
    for _ in range(2):
        assert current_task_id() == NO_TASK
        watched.at(middle.sum()).backward(retain_graph=True)
        assert watched.met == [Entry.BEGINS, None]
        assert not watched.watch.running
        assert not watched.watch.raised
        watched.met.clear()
    assert seen == [(True, False)] * 2


def test_a_failure_is_told_at_once_and_met_until_it_is_dealt_with() -> None:
    watched = Watched()
    with pytest.raises(RuntimeError, match="half way") as kept:
        watched.loss(raises=True).backward()
    assert kept.tb is not None, "which must not keep the graph task alive"
    assert (watched.watch.raised, watched.watch.running) == (True, False)
    watched.loss().backward()
    assert watched.met == [Entry.BEGINS, Entry.AFTER_FAILURE]
    watched.watch.forget()
    assert not watched.watch.raised
    watched.loss().backward()
    assert watched.met[2:] == [Entry.BEGINS]


@pytest.mark.parametrize("raises", [False, True])
def test_a_backward_in_a_hook_of_another_is_nested(raises: bool) -> None:
    """And no failure of the other, if it raised and was caught."""
    watched = Watched()
    total, inner = ready().sum(), watched.loss(raises)

    def hook(grad: Tensor) -> None:
        with pytest.raises(RuntimeError, match="half way") if raises else nullcontext():
            inner.backward()

    total.register_hook(hook)
    watched.at(total)
    watched.at(total * 2).backward()
    assert watched.met == [Entry.BEGINS, Entry.NESTED, None]
    assert not watched.watch.running
    assert not watched.watch.raised


def test_reentrant_checkpointing_is_nested() -> None:
    watched = Watched()
    leaf = ready()
    out = checkpoint(lambda x: watched.at(x.square()), leaf, use_reentrant=True)
    watched.at(out.sum()).backward()
    assert watched.met == [Entry.BEGINS, Entry.NESTED]
    assert leaf.grad is not None


def test_end_of_task_runs_after_all_gradients() -> None:
    leaf = ready()
    order: list[str] = []
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    out = leaf.sum()
    out.register_hook(lambda grad: at_end_of_task(lambda: order.append("end")))
    out.backward()
    assert order == ["gradient", "end"]
