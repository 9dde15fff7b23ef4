"""The functions of proofs on parameters, buffers, optimizers and schedules; see scripts.py."""

import math

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from ds_patches.diagnostics.proofs.frame import CONFIG, DeepSpeed, PyTorch
from ds_patches.diagnostics.proofs.scripts import Around, train


def adapted(parts, x):
    return checkpoint(lambda x: parts[0](x) + parts[1](x), x.requires_grad_(), use_reentrant=False)


def adapters(start, net, data):
    frozen, adapter = nn.Sequential(nn.LayerNorm(16), net).requires_grad_(False), nn.Linear(16, 16)
    return train(start(Around(nn.ModuleList([frozen, adapter]), adapted)), data[:1])


def inference_mode(start, net, data):
    engine, (x, y) = start(nn.Sequential(nn.LayerNorm(16), net)), data[0]
    for loss in train(engine, [(x, y)]):
        with torch.inference_mode():
            engine(x)
        yield loss


def rotated(net):
    """Add sines of positions that bf16 cannot represent, as in a rotary table."""
    net.register_buffer("index", torch.arange(4096, 4112, dtype=torch.float32))
    return Around(net, lambda net, x: net((x * net.index.float().sin()).to(net[0].weight.dtype)))


def fp32_buffers(start, net, data):
    return train(start(rotated(net)), data[:1])


def buffers_in_init(start, net, data):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, enabled=start is DeepSpeed):
        model = rotated(net)
    return train(start(model), data[:1])


def loaded(start, net, data):
    own = start is DeepSpeed
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, enabled=own):
        model = nn.Linear(16, 16)
    with deepspeed.zero.GatheredParameters([*model.parameters()], 0, enabled=own):
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
    return train(start(model), data[:1])


def by_hand(start, net, data):
    engine = start(net)
    params = [*net.parameters()]
    with deepspeed.zero.GatheredParameters(params, 0), torch.no_grad():
        for param in params:
            param.mul_(0.1)
    return train(engine, data[:1])


def penalty(start, net, data):
    engine, (x, y), params = start(net), data[0], [*net.parameters()]
    for _ in range(20):
        with deepspeed.zero.GatheredParameters(params, enabled=start is DeepSpeed):
            decay = sum(param.pow(2).sum() for param in params)
        loss = mse_loss(engine(x), y)
        engine.backward(loss + 0.01 * decay)
        engine.step()
        yield loss  # on CPU ranks of 0.16.0 a block may see its weights late


def no_dimensions(start, net, data):
    net.scale = nn.Parameter(torch.tensor(1.0))
    return train(start(Around(net, lambda net, x: net(x) * net.scale)), data[:1])


def in_tiles(net, x):
    x, params = x.requires_grad_()[None], [*net.parameters()]
    return TiledMLP.apply(lambda net, tile: net(tile), net, x, 2, params)[0]


def tiled(start, net, data):
    return train(start(net if start is PyTorch else Around(net, in_tiles)), data[:1])


def fused_adam(start, net, data):
    kind = torch.optim.Adam if start is PyTorch else FusedAdam
    # DeepSpeed's FP16_Optimizer takes a step of zeros first, which these betas forget; this eps is
    # so large that rounding stays small.
    optimizer = kind(net.parameters(), lr=0.1, betas=(0.0, 0.0), eps=0.1)
    return train(start(net, optimizer), [(x.to(net[0].weight.dtype), y) for x, y in data[:1]])


def decayed(start, net, data):
    # As in `fused_adam`: rounding stays small.
    settings = {"betas": (0.0, 0.0), "eps": 0.1, "weight_decay": 2.0}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **settings)
    return train(start(net, optimizer), [(x.to(net[0].weight.dtype), y) for x, y in data])


def late_step(start, net, data):
    optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=1.0), data[0]
    optimizer.register_step_pre_hook(
        lambda *_: torch.cuda._sleep(50_000_000)
    )  # on the current stream
    return [*train(start(net, optimizer), [(x, y)])]  # no synchronization of the host in between


def by_schedule(start, net, data, kind, rate, **settings):
    groups = [{"params": net[index].parameters(), "lr": lr} for index, lr in ((0, 1.0), (2, 0.1))]
    optimizer, settings["warmup_type"] = torch.optim.SGD(groups), "linear"
    engine = start(net, optimizer, scheduler={"type": kind, "params": settings})
    if start is PyTorch:
        schedule = LambdaLR(optimizer, rate)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    return train(engine, data[:1])


def warmup(start, net, data):
    return by_schedule(
        start, net, data, "WarmupLR", lambda step: min(1, max(0, step - 1) / 4), warmup_num_steps=4
    )


def cosine(start, net, data):
    def rate(step):
        down = (1 + math.cos(math.pi * min(1, (step - 2) / 6))) / 2
        return 0.0001 + 0.9999 * down if step > 2 else max(0, step - 1) / 2

    settings = {"total_num_steps": 8, "warmup_num_steps": 2}
    return by_schedule(start, net, data, "WarmupCosineLR", rate, **settings)


def pipeline(start, net, data):
    for tensor in (tensor for pair in data for tensor in pair):
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
