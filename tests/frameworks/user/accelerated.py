"""A loop of one's own by Accelerate, as its guides have it."""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.frameworks.user import Trained

WIDTH, BATCH, ROWS, SEED = 16, 4, 64, 5


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.first(x), self.second(x)


def train(deepspeed: dict[str, Any] | None = None, *, micro_steps: int = 4) -> Trained:
    """Accumulate gradients."""
    plugin = deepspeed and DeepSpeedPlugin(
        hf_ds_config=deepspeed, gradient_accumulation_steps=micro_steps
    )
    accelerator = Accelerator(gradient_accumulation_steps=micro_steps, deepspeed_plugin=plugin)
    torch.manual_seed(SEED)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6))
    loader = DataLoader(data, batch_size=BATCH)
    start = TwoHeads()
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(start, optimizer, loader)
    losses = []
    for x in loader:
        with accelerator.accumulate(model):
            loss = sum(losses_of(model(x), x))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return Trained(model, losses)


def losses_of(outputs: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    logits, rebuilt = outputs
    return F.cross_entropy(logits, x[:, :3].argmax(1)), (rebuilt - x).square().mean()
