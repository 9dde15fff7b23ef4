"""Loops of one's own, by DeepSpeed's engine or by what PyTorch has in place of it."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.frameworks.user import Trained

WIDTH, BATCH, STEPS, RATE = 16, 8, 3, 0.1


class Plain(nn.Module):
    """One process: a model and its optimizer, called as an engine is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:  # type: ignore[override]
        self._optimizer.zero_grad()


def engine(module: nn.Module, config: dict[str, Any] | None) -> Any:
    if config is None:
        return Plain(module)
    import deepspeed

    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def two_layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def rows(step: int, deepspeed: bool, kind: int = 0) -> Tensor:
    """A rank's part of the batch of a step; all of it, for a process alone."""
    made = torch.Generator().manual_seed(100 * step + kind)
    whole = torch.randn(2, BATCH, WIDTH, generator=made)
    return whole[dist.get_rank()] if deepspeed else whole.flatten(0, 1)


def adversaries(deepspeed: dict[str, Any] | None = None, *, freezes: bool = False) -> Trained:
    """A GAN: the generator's loss goes through the discriminator, which is trained first.

    freezes: then the discriminator gets no gradient of that.
    """
    torch.manual_seed(8)
    generator = engine(two_layers(WIDTH), deepspeed)
    discriminator = engine(two_layers(1), deepspeed)
    losses = []
    for step in range(STEPS):
        real, noise = (rows(step, bool(deepspeed), kind) for kind in (0, 1))
        fake = generator(noise)
        discriminator.zero_grad()
        judged = F.softplus(-discriminator(real)).mean()
        judged = judged + F.softplus(discriminator(fake.detach())).mean()
        discriminator.backward(judged)
        discriminator.step()
        discriminator.module.requires_grad_(not freezes)
        fooled = F.softplus(-discriminator(fake)).mean()
        generator.backward(fooled)
        discriminator.module.requires_grad_(True)
        generator.step()
        losses.append(fooled.item())
    return Trained((generator, discriminator), losses)


def cached_gradients(
    deepspeed: dict[str, Any] | None = None, *, chunk: int = 2, reduces_once: bool = False
) -> Trained:
    """GradCache's own way: a plain backward of a surrogate for each chunk, then the step."""
    torch.manual_seed(9)
    encoder = engine(two_layers(WIDTH), deepspeed)
    losses = []
    for step in range(STEPS):
        chunks = rows(step, bool(deepspeed)).split(chunk)
        with torch.no_grad():
            embedded = torch.cat([encoder(part) for part in chunks])
        embedded.requires_grad_()
        loss = contrast(embedded) if deepspeed else sum(map(contrast, embedded.chunk(2))) / 2
        loss.backward()
        with encoder.coalesce_grad_reduction() if reduces_once else nullcontext():
            for part, gradient in zip(chunks, embedded.grad.split(chunk), strict=True):
                torch.dot(encoder(part).flatten(), gradient.flatten()).backward()
        encoder.step()
        losses.append(loss.item())
    return Trained(encoder, losses)


def contrast(embedded: Tensor) -> Tensor:
    """Neighbours belong together; each rank has the negatives of its own batch."""
    first, second = F.normalize(embedded, dim=1).view(-1, 2, WIDTH).unbind(1)
    return F.cross_entropy(5 * first @ second.T, torch.arange(len(first)))
