"""Batches of this rank's, other ones on each, and the losses over them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.models.shapes import CLASSES, VOCABULARY, WIDTH, Losses


def device() -> torch.device:
    """This rank's: the CPU in the suite, a GPU under :mod:`tests.gpu`."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def batch(step: int, micro: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    """Tokens `[size]` and classes `[size]` of this rank; others get other ones."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (size,), generator=generator)
    return tokens.to(device()), (tokens % CLASSES).to(device())


def losses(
    outputs: Losses | dict[str, Tensor] | tuple[Tensor, ...], classes: Tensor
) -> list[Tensor]:
    """A classification and a reconstruction loss over the two heads."""
    logits, rebuilt = outputs.values() if isinstance(outputs, dict) else outputs
    return [F.cross_entropy(logits.float(), classes), rebuilt.float().square().mean()]


def both_losses(trainer: Any, step: int, micro: int = 0) -> list[Tensor]:
    """A forward over a batch of this rank's, and the losses of both heads."""
    tokens, classes = batch(step, micro)
    return losses(trainer(tokens), classes)


def loss_of(trainer: Any, step: int, micro: int = 0, only: slice = slice(None)) -> Tensor:
    """The same, added up."""
    total: Tensor = sum(both_losses(trainer, step, micro)[only])  # type: ignore[assignment]
    return total


def features(step: int) -> Tensor:
    """Continuous inputs `[6, WIDTH]` that want a gradient, for a critic."""
    tokens, _ = batch(step)
    columns = torch.arange(WIDTH, dtype=torch.float32, device=tokens.device)
    return torch.sin(tokens[:, None] * 0.7 + columns).requires_grad_()
