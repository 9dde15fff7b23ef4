"""The gradients that a step should have, from plain PyTorch, and how far an engine's are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workload import Batch


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


def plain_gradients(weights: Sequence[Tensor], batch: Batch, losses: Sequence[int]) -> list[Tensor]:
    """What PyTorch accumulates over `losses` of one forward, averaged over the ranks; float32.

    The model is spelled out in functions: DeepSpeed replaces ``torch.nn.functional.linear``.
    """
    leaves = [weight.detach().requires_grad_() for weight in weights]
    outputs = batch.inputs
    for leaf in leaves:
        outputs = torch.relu(outputs @ leaf.t())
    for index in losses:
        loss = batch.loss(outputs, index)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradient = leaf.grad.float()
        dist.all_reduce(gradient)
        gradients.append(gradient / dist.get_world_size())
    return gradients


def relative_error(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest ``||gradient - reference|| / ||reference||`` of all weights; NaN if any is."""
    errors = [
        (torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)).item()
        for ours, theirs in zip(gradients, reference, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")
