"""Backwards are seen at a forward's outputs, wherever these lie: plain PyTorch."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import Tensor

from ds_patches.accumulation.outputs import watch

Pair = namedtuple("Pair", ["first", "second"])


def test_outputs_in_nested_containers() -> None:
    leaf = torch.ones(2, requires_grad=True)
    outputs = {"a": leaf * 2, "b": [leaf * 3, (Pair(leaf * 4, leaf.detach()), "no tensor", None)]}
    seen: list[float] = []
    watch(outputs, lambda grad: seen.append(grad.sum().item()))
    a, (b, (pair, *_)) = outputs.values()
    (a.sum() + b.sum()).backward(retain_graph=True)
    assert seen == [2.0, 2.0]
    torch.autograd.grad(pair.first.sum(), leaf)
    assert seen == [2.0, 2.0, 2.0]


def test_a_leaf_is_left_alone() -> None:
    """A model that gives back its input, or a parameter, has run no graph."""
    leaf = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    watch([leaf, torch.ones(1)], seen.append)
    leaf.sum().backward()
    assert not seen
