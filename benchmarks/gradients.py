"""The gradients that a step should have, from plain PyTorch, and how far an engine's are off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import loss_of

Forward = Callable[[Tensor], Tensor]


def full_weights(engine: Any) -> list[Tensor]:
    """A copy of every weight, gathered from all ranks."""
    import deepspeed

    copies = []
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([param]):
            copies.append(param.detach().clone())
    return copies


def full_gradients(engine: Any) -> list[Tensor]:
    """Every weight's reduced gradient, gathered from all ranks; float32."""
    from deepspeed.utils import safe_get_full_grad

    gradients = []
    for name, param in engine.module.named_parameters():
        gradient = safe_get_full_grad(param)
        assert gradient is not None, f"{name} has no gradient"
        gradients.append(gradient.float())
    return gradients


def plain_gradients(weights: Sequence[Tensor], train: Callable[[Forward], None]) -> list[Tensor]:
    """What PyTorch accumulates while `train` runs backwards, averaged over the ranks; float32.

    `train` is given the forward of ``engines``' layers with these weights, in functions, since
    DeepSpeed replaces ``torch.nn.functional.linear``.
    """
    leaves = [weight.detach().requires_grad_() for weight in weights]

    def forward(inputs: Tensor) -> Tensor:
        for leaf in leaves:
            if leaf.dim() == 1:
                inputs = torch.rms_norm(inputs, leaf.shape, leaf)
            else:
                inputs = torch.relu(inputs @ leaf.t())
        return inputs

    train(forward)
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradient = leaf.grad.float()
        dist.all_reduce(gradient)
        gradients.append(gradient / dist.get_world_size())
    return gradients


def plain_backwards(batches: Sequence[Tensor], micro_steps: int, forward: Forward) -> None:
    """The backwards of one step, in plain PyTorch, each of a part of its `micro_steps`."""
    for inputs in batches:
        (loss_of(forward(inputs)) / micro_steps).backward()  # type: ignore[no-untyped-call]


def relative_error(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest ``||gradient - reference|| / ||reference||`` of all weights; NaN if any is."""
    errors = [
        (torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)).item()
        for ours, theirs in zip(gradients, reference, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")
