"""The training step: GradCache, with all its backwards in one window."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.gradcache.model import contrast


def step(engine: Any, images: Tensor, chunk: int, window: AbstractContextManager[Any]) -> Tensor:
    """One optimizer step on this rank's images; returns the loss over those of all ranks.

    window: ``engine.coalesce_grad_reduction()``.

    Both forwards of a chunk must compute the same. With dropout, save the random state before a
    chunk's first forward (`torch.get_rng_state`, `torch.cuda.get_rng_state`) and set it again
    before its second.
    """
    chunks = images.split(chunk)
    with torch.no_grad():
        embeddings = torch.cat([engine(part) for part in chunks])
    loss, gradient = cached_gradient(embeddings)
    with window:
        for part, cached in zip(chunks, gradient.split(chunk), strict=True):
            engine.backward((engine(part) * cached).sum())
    engine.step()
    return loss


def cached_gradient(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The loss over the embeddings of all ranks, and what to send back through this rank's.

    Every rank computes the whole loss, so its own rows of the gradient are complete and none has
    to travel. ZeRO averages over ranks what this loss wants summed: hence times their number.
    """
    everyone = gathered(embeddings).requires_grad_()
    loss = contrast(everyone)
    (gradient,) = torch.autograd.grad(loss, everyone)
    ranks = dist.get_world_size()
    return loss.detach(), gradient.chunk(ranks)[dist.get_rank()] * ranks


def gathered(embeddings: Tensor) -> Tensor:
    """The embeddings of all ranks, in the order of the ranks."""
    parts = [torch.empty_like(embeddings) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, embeddings)
    return torch.cat(parts)
