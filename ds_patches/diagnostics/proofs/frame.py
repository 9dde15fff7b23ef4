"""TITLE
[DS_ACCELERATOR=cpu] torchrun --nproc_per_node 2 FILE prints the loss of each step on both sides."""

import os
import sys

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss  # noqa: F401

CONFIG = {}


class PyTorch:  # the reference: gradients are averaged over micro steps and ranks
    def __init__(self, model, optimizer=None, gradient_accumulation_steps=1, **_):
        self.module, self.calls = model.to(device), 0
        self.micro_steps = gradient_accumulation_steps
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss, **options):
        (loss / self.micro_steps).backward(**options)

    def step(self):
        self.calls += 1
        if self.calls % self.micro_steps == 0:
            for param in self.module.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad.div_(dist.get_world_size()))
            self.optimizer.step()
            self.optimizer.zero_grad()


def DeepSpeed(model, optimizer=None, **more):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG | more)[0]


def script(start, net, data):
    """Replaced by the function of a proof."""


if __name__ == "__main__":
    deepspeed.init_distributed()
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    device = deepspeed.get_accelerator().current_device_name()
    for start in [globals()[side] for side in sys.argv[1:]] or [PyTorch, DeepSpeed]:
        torch.manual_seed(dist.get_rank())
        data = [(x, x.roll(1, 1)) for x in torch.randn(4, 32, 16).to(device)]
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        values = [loss.item() for loss in script(start, net, data)]
        losses = torch.tensor(values, device=device)
        dist.all_reduce(losses.div_(dist.get_world_size()))
        sys.stdout.write(f"{start.__name__} {' '.join(map(str, losses.tolist()))}\n")
    dist.destroy_process_group()
