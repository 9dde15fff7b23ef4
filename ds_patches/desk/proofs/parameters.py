"""What is trained where parameters and buffers are what matters; as in scripts.py."""

import contextlib

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ds_patches.desk.proofs.frame import CONFIG, DeepSpeed, PyTorch
from ds_patches.desk.proofs.scripts import Around, train


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
    """The sines of a rotary table, at positions that bf16 has not."""
    net.register_buffer("at", torch.arange(4096, 4112, dtype=torch.float32))
    return Around(net, lambda net, x: net((x * net.at.float().sin()).to(net[0].weight.dtype)))


def fp32_buffers(start, net, data):
    return train(start(rotated(net)), data[:1])


def buffers_in_init(start, net, data):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, enabled=start is DeepSpeed):
        model = rotated(net)
    return train(start(model), data[:1])


def loaded(start, net, data):
    own = start is DeepSpeed
    with deepspeed.zero.Init(config_dict_or_path=CONFIG) if own else contextlib.nullcontext():
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
