"""Loops of one's own by Accelerate, as its guides have them."""

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


def accumulation(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Gradient accumulation."""
    losses = []
    for x in loader:
        with accelerator.accumulate(model):
            loss = sum(losses_of(model(x), x))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def two_losses(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Two losses over one forward; an engine has the first: Accelerate would step at once."""
    losses = []
    for x in loader:
        with accelerator.accumulate(model):
            first, second = losses_of(model(x), x)
            if accelerator.state.deepspeed_plugin:
                with model.no_sync():
                    model.backward(first, retain_graph=True)
            else:
                accelerator.backward(first, retain_graph=True)
            accelerator.backward(second)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce((first + second).detach(), "mean").item())
    return losses


def train(loop: str, deepspeed: dict[str, Any] | None = None, *, micro_steps: int = 4) -> Trained:
    plugin = deepspeed and DeepSpeedPlugin(
        hf_ds_config=deepspeed, gradient_accumulation_steps=micro_steps
    )
    accelerator = Accelerator(gradient_accumulation_steps=micro_steps, deepspeed_plugin=plugin)
    torch.manual_seed(SEED)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6))
    loader = DataLoader(data, batch_size=BATCH)
    prepared = accelerator.prepare(model, optimizer, loader)
    return Trained(prepared[0], globals()[loop](accelerator, *prepared))


def losses_of(outputs: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    logits, rebuilt = outputs
    return F.cross_entropy(logits, x[:, :3].argmax(1)), (rebuilt - x).square().mean()
