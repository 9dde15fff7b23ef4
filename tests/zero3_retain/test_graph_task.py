"""Three fates of a run of the autograd engine, and windows over a forward: plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_patches.zero3_retain.graph_task import NO_TASK, TaskWatch, at_end_of_task, current_task_id
from ds_patches.zero3_retain.window import ForwardWindow, tensors_with_graph


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


def watched(watch: TaskWatch, raises: bool) -> Tensor:
    out = RaiseIf.apply(torch.ones(2, requires_grad=True), raises).sum()
    out.register_hook(lambda grad: watch.enter())
    return out


def test_no_task_outside_a_backward() -> None:
    assert current_task_id() == NO_TASK


def test_finished_backward_did_not_raise() -> None:
    watch = TaskWatch()
    watched(watch, raises=False).backward()
    assert not watch.raised


def test_backward_that_raises_is_told_at_once() -> None:
    watch = TaskWatch()
    with pytest.raises(RuntimeError, match="half way"):
        watched(watch, raises=True).backward()
    assert watch.raised
    watch.forget()
    assert not watch.raised


def test_running_backward_has_not_raised() -> None:
    watch = TaskWatch()
    seen = []
    out = torch.ones(2, requires_grad=True)
    out.register_hook(lambda grad: seen.append(watch.raised))
    total = (out * 2).sum()
    total.register_hook(lambda grad: watch.enter())
    total.backward()
    assert seen == [False]
    assert not watch.raised


def test_failure_shows_through_a_kept_exception() -> None:
    """The traceback that a user keeps must not keep the graph task alive."""
    watch = TaskWatch()
    try:
        watched(watch, raises=True).backward()
    except RuntimeError as error:
        kept = error
    assert kept.__traceback__ is not None
    assert watch.raised


def test_end_of_task_runs_after_all_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    order: list[str] = []
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    out = leaf.sum()
    out.register_hook(lambda grad: at_end_of_task(lambda: order.append("end")))
    out.backward()
    assert order == ["gradient", "end"]


def test_window_counts_graph_tasks_not_outputs() -> None:
    leaf = torch.ones(2, requires_grad=True)
    outputs = {"a": leaf * 2, "b": [leaf * 3, (leaf * 4, "no tensor")]}
    counts: list[int] = []
    window = ForwardWindow(outputs, lambda window: counts.append(window.backwards))
    a, b, c = (tensor.sum() for tensor in tensors_with_graph(outputs))
    (a + b + c).backward(retain_graph=True)
    b.backward(retain_graph=True)
    torch.autograd.grad(c, leaf)
    assert counts == [1, 2, 3]
    assert window.backwards == 3


def test_tensors_without_a_graph_are_not_watched() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert list(tensors_with_graph([leaf, torch.ones(1), None, leaf.detach()])) == []
