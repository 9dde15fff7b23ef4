"""Two losses over one ZeRO-3 forward, on handwritten digits: `python -m examples.two_losses`.

Which digit is it, and what did it look like? Two CPU ranks train a shared trunk with two heads by
plain PyTorch, by stock and by patched DeepSpeed. The exit status is 0 if patched is right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy, mse_loss

from ds_patches.diagnostics import proofs, prove
from examples import digits

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 0.0,
    # 0: partition the smallest parameter too
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class TwoHeads(nn.Module):
    """Maps images (batch, 64) to logits (batch, 10) and pixels (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.digit, self.pixels = nn.Linear(96, digits.CLASSES), nn.Linear(96, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.trunk(images)
        return self.digit(code), self.pixels(code)


def two_losses(start: Callable[..., Any], net: nn.Module, data: Any) -> Iterator[Tensor]:
    """Train an epoch with an engine that `start` builds; yield the loss of each step."""
    images, labels = digits.load()
    images = images.flatten(1)
    model = TwoHeads()
    engine = start(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for batch in torch.randperm(len(labels)).split(64)[:-1]:
        indices = batch[dist.get_rank() :: 2]
        logits, pixels = engine(images[indices])
        digit, pixel = cross_entropy(logits, labels[indices]), mse_loss(pixels, images[indices])
        engine.backward(digit, retain_graph=True)
        engine.backward(pixel)
        engine.step()
        yield digit + pixel


def main() -> int:
    title = (__doc__ or "").partition(":")[0]
    print(f"{title}\nDeepSpeed {version('deepspeed')}, torch {version('torch')}\n", flush=True)
    body = "from examples.two_losses import two_losses"
    runs = prove.train(proofs.framed(title, CONFIG, body, "two_losses"), "cpu")
    print(*prove.table(runs), sep="\n")
    return int(not runs["patched"].is_right)


if __name__ == "__main__":
    sys.exit(main())
