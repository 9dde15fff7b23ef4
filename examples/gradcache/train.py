"""GradCache: the model, its loss, and the step, whose backwards are all in one block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from examples.digits import SIDE

_WIDTH = 96
_EMBEDDING = 32
_TEMPERATURE = 0.1


def _tower() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE // 2, _WIDTH),
        nn.LayerNorm(_WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _EMBEDDING),
    )


class TwoTowers(nn.Module):
    """Maps images (batch, 8, 8) to unit embeddings (batch, 2, 32): left halves, right halves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _tower(), _tower()

    def forward(self, images: Tensor) -> Tensor:
        left, right = images.chunk(2, dim=2)
        return functional.normalize(torch.stack((self.left(left), self.right(right)), 1), dim=2)


def contrast(embeddings: Tensor) -> Tensor:
    """Return the symmetric InfoNCE loss: find each half's partner among all halves."""
    left, right = embeddings.unbind(1)
    logits = left @ right.T / _TEMPERATURE
    partner = torch.arange(len(logits), device=logits.device)
    loss = functional.cross_entropy(logits, partner) + functional.cross_entropy(logits.T, partner)
    return loss / 2


def step(engine: Any, images: Tensor, chunk: int, block: AbstractContextManager[Any]) -> Tensor:
    """Take an optimizer step on this rank's images; return the loss over all ranks' images.

    block: ``engine.coalesce_grad_reduction()``.

    Both forwards of a chunk must compute the same. With dropout, save the random state before a
    chunk's first forward (`torch.get_rng_state`, `torch.cuda.get_rng_state`) and restore it
    before its second.
    """
    chunks = images.split(chunk)
    with torch.no_grad():
        embeddings = torch.cat([engine(part) for part in chunks])
    loss, gradient = cached_gradient(embeddings)
    with block:
        for part, cached in zip(chunks, gradient.split(chunk), strict=True):
            engine.backward((engine(part) * cached).sum())
    engine.step()
    return loss


def cached_gradient(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss over the embeddings of all ranks, and its gradient at this rank's embeddings.

    Every rank computes the whole loss, so its own rows of the gradient are complete and need no
    communication. They have to be summed over ranks, but ZeRO averages: hence the factor.
    """
    ranks = dist.get_world_size()
    parts = [torch.empty_like(embeddings) for _ in range(ranks)]
    dist.all_gather(parts, embeddings)
    everyone = torch.cat(parts).requires_grad_()
    loss = contrast(everyone)
    (gradient,) = torch.autograd.grad(loss, everyone)
    return loss.detach(), gradient.chunk(ranks)[dist.get_rank()] * ranks
