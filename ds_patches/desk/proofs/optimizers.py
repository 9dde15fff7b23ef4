"""What is trained where optimizers, schedules or a pipeline are what matters; as in scripts.py."""

import math

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from ds_patches.desk.proofs.frame import PyTorch
from ds_patches.desk.proofs.scripts import train, train_by_halves


def by_adam(start, net, data, kind, **more):
    if start is PyTorch:
        kind = torch.optim.Adam
    # DeepSpeed's FP16_Optimizer takes a step of zeros first, which these betas forget; this eps is
    # so large that rounding stays small.
    optimizer = kind(net.parameters(), lr=0.1, betas=(0.0, 0.0), eps=0.1)
    return train(start(net, optimizer, **more), [(x.to(net[0].weight.dtype), y) for x, y in data])


def decayed(start, net, data):
    # As above: rounding stays small.
    some = {"betas": (0.0, 0.0), "eps": 0.1, "weight_decay": 2.0}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **some)
    return train(start(net, optimizer), [(x.to(net[0].weight.dtype), y) for x, y in data])


def cpu_adam(start, net, data):
    return by_adam(start, net, data, DeepSpeedCPUAdam, gradient_accumulation_steps=4)


def fused_adam(start, net, data):
    return by_adam(start, net, data[:1], FusedAdam)


def late_step(start, net, data):
    optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=1.0), data[0]
    optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(50_000_000))  # on its stream
    return [*train(start(net, optimizer), [(x, y)])]  # and the host waits for nothing meanwhile


def by_schedule(start, net, data, kind, settings, rate):
    groups = [{"params": net[at].parameters(), "lr": lr} for at, lr in ((0, 1.0), (2, 0.1))]
    optimizer = torch.optim.SGD(groups)
    engine = start(net, optimizer, scheduler={"type": kind, "params": settings})
    if start is PyTorch:
        schedule = LambdaLR(optimizer, rate)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    return train(engine, data[:1])


def warmup(start, net, data):
    settings = {"warmup_num_steps": 4, "warmup_type": "linear"}

    def rate(step):
        return min(1, max(0, step - 1) / 4)

    return by_schedule(start, net, data, "WarmupLR", settings, rate)


def cosine(start, net, data):
    settings = {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_type": "linear"}

    def rate(step):
        down = (1 + math.cos(math.pi * min(1, (step - 2) / 6))) / 2
        return 0.0001 + 0.9999 * down if step > 2 else max(0, step - 1) / 2

    return by_schedule(start, net, data, "WarmupCosineLR", settings, rate)


def by_muon(start, model, **more):
    torch.compiler.set_stance("force_eager")  # to compile takes longer than to train
    kinds = [[p for p in model.parameters() if (p.ndim > 1) == whole] for whole in (True, False)]
    for param in model.parameters():
        param.use_muon = param.ndim > 1
    groups = [{"params": kind, "use_muon": kind is kinds[0]} for kind in kinds]
    plain = original_muon.SingleDeviceMuonWithAuxAdam
    return start(model, (plain if start is PyTorch else MuonWithAuxAdam)(groups), **more)


def muon(start, net, data):
    return train(by_muon(start, nn.Sequential(*net, nn.Tanh(), nn.Linear(16, 16))), data[:1])


def muon_micro_steps(start, net, data):
    return train(by_muon(start, nn.Linear(16, 16), gradient_accumulation_steps=4), data)


def muon_two_losses(start, net, data):
    return train_by_halves(by_muon(start, net), *data[0])


def pipeline(start, net, data):
    for tensor in (one for pair in data for one in pair):
        dist.broadcast(tensor, 0)  # both ranks are stages of one model
    whole = start is PyTorch
    model = net if whole else PipelineModule([*net], num_stages=2, loss_fn=mse_loss)
    engine = start(model, gradient_accumulation_steps=4)
    for _ in range(20):
        losses = [mse_loss(engine(x), y) for x, y in data if whole]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        yield sum(losses) / 4 if whole else engine.train_batch(iter(data))
