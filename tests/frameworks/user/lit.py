"""Lightning's manual optimisation: two losses over one forward."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from tests.frameworks.user import Trained
from tests.frameworks.user.accelerated import BATCH, ROWS, SEED, WIDTH, TwoHeads, losses_of


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy, which asks for GPUs, and needs none."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class TwoLosses(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = TwoHeads()
        self.losses: list[float] = []

    def training_step(self, x: Tensor) -> None:
        optimizer = self.optimizers()
        first, second = losses_of(self.net(x), x)
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append((first + second).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(output: Path, deepspeed: dict[str, Any] | None = None) -> Trained:
    torch.manual_seed(SEED)
    model = TwoLosses()
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6))
    ranks = 2 if deepspeed else 1
    sampler = DistributedSampler(data, shuffle=False) if deepspeed else SequentialSampler(data)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=OnCPU(config=deepspeed) if deepspeed else "auto",
        devices=ranks,
        max_epochs=1,
        default_root_dir=output,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=BATCH * 2 // ranks, sampler=sampler))
    return Trained(trainer.strategy.model, model.losses)
