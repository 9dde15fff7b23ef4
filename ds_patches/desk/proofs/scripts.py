"""What is trained, each by a function of ten lines or so; `compose` puts one into the frame.

start: makes an engine, DeepSpeed's or plain PyTorch. net: a small model. data: four batches of this
rank's. What a script yields, or returns an iterator of, is the loss of each step.
"""

# ruff: noqa: B905
import contextlib
import copy
import itertools
import math

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from ds_patches.desk.proofs.frame import CONFIG, DeepSpeed, PyTorch


class Around(nn.Module):
    """A net in a model with a forward of its own."""

    def __init__(self, net, forward):
        super().__init__()
        self.net, self.run = net, forward

    def forward(self, *inputs):
        return self.run(self.net, *inputs)


def train(engine, data):
    for _ in range(20):
        for x, y in data:
            loss = mse_loss(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
        yield loss


def train_by_halves(engine, x, y):
    for _ in range(20):
        out = engine(x)
        first, second = mse_loss(out[:, :8], y[:, :8]), mse_loss(out[:, 8:], y[:, 8:])
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        engine.step()
        yield first + second


def one_backward(start, net, data):
    engine, (x, y) = start(net), data[0]
    return train(engine, [(x.to(net[0].weight.dtype), y)])


def micro_steps(start, net, data):
    return train(start(net, gradient_accumulation_steps=4), data)


def by_adam(start, net, data, kind, **more):
    if start is PyTorch:
        kind = torch.optim.Adam
    # DeepSpeed's FP16_Optimizer takes a step of zeros first, which these betas forget; this eps is
    # so large that rounding stays small.
    optimizer = kind(net.parameters(), lr=0.1, betas=(0.0, 0.0), eps=0.1)
    return train(start(net, optimizer, **more), [(x.to(net[0].weight.dtype), y) for x, y in data])


def decayed(start, net, data):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=2.0)
    return train(start(net, optimizer), [(x.to(net[0].weight.dtype), y) for x, y in data])


def cpu_adam(start, net, data):
    return by_adam(start, net, data, DeepSpeedCPUAdam, gradient_accumulation_steps=4)


def fused_adam(start, net, data):
    return by_adam(start, net, data[:1], FusedAdam)


def late_step(start, net, data):
    optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=1.0), data[0]
    optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(50_000_000))  # on its stream
    return [*train(start(net, optimizer), [(x, y)])]  # and the host waits for nothing meanwhile


def skipped_frame(start, net, data):
    eager = torch.compiler.disable(lambda net, x: net(x))
    engine = start(Around(net, lambda net, x: net[2](eager(net[:2], x))))
    if start is DeepSpeed:
        engine.compile()
    return train(engine, data[:1])


def two_backwards(start, net, data):
    return train_by_halves(start(net), *data[0])


def forwards_first(start, net, data):
    engine = start(net)
    for _ in range(20):
        first, second = (mse_loss(engine(x), y) / 2 for x, y in data[:2])
        engine.backward(first)
        engine.backward(second)
        engine.step()
        yield first + second


def gradient_penalty(start, net, data):
    engine, (x, y) = start(net), data[0]
    for _ in range(20):
        out = engine(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        loss = mse_loss(out, y) + slope.square().mean()
        engine.backward(loss)
        engine.step()
        yield loss


def own_checkpointing(start, net, data):
    if data[0][0].is_cpu:  # which has no streams
        kind = type(deepspeed.get_accelerator())
        kind.Stream = property(lambda _: lambda **_: None)
    own = deepspeed.checkpointing.checkpoint if start is DeepSpeed else lambda run, x: run(x)
    model = Around(net, lambda net, x: net[2](own(net[:2], x.requires_grad_())))
    return train_by_halves(start(model), *data[0])


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.base = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.base(x)
        parts = {"left": self.left(x), "right": self.right(x)}
        return parts.get(self.of, sum(parts.values()))


def train_towers(start, data, turns, **more):
    model = Towers()
    engine = start(model, **more)
    for turn in turns:  # of a step: the tower of each micro step
        losses = []
        for (x, y), model.of in zip(data, turn):
            losses.append(mse_loss(engine(x), y))
            engine.backward(losses[-1])
            engine.step()
        yield sum(losses)


def unused_parameter(start, net, data):
    return train_towers(start, data, [["both"], ["left"]] * 10)


def other_parameters(start, net, data):
    return train_towers(start, data, [["left", "right"]] * 20, gradient_accumulation_steps=2)


def experts(start, net, data):
    turns = [["left"], ["right"]] * 11
    return train_towers(start, data, turns[dist.get_rank() :][:20])


def for_causal_lm(net, x, labels):
    logits = net(x)  # and so the outputs lead to one another, as those of transformers do
    return {"loss": mse_loss(logits, labels), "logits": logits}


def outputs(start, net, data, plain=False):
    engine = start(Around(net, for_causal_lm), gradient_accumulation_steps=4)
    for _ in range(20):
        for x, y in data:
            loss = engine(x, y)["loss"]
            if plain and start is DeepSpeed:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        yield loss


def outputs_plain(start, net, data):
    return outputs(start, net, data, plain=True)


def batch_size(start, net, data):
    engine = start(net, gradient_accumulation_steps=2)
    yield from itertools.islice(train(engine, data[:2]), 2)
    if start is PyTorch:
        engine.micro_steps, engine.calls = 3, 0
    else:
        engine.set_train_batch_size(3 * dist.get_world_size())
    yield from train(engine, data[:3])


def around_the_engine(start, net, data):
    engine = start(net, gradient_accumulation_steps=2)
    for _ in range(20):
        for forward, (x, y) in zip((engine, engine.module), data):
            loss = mse_loss(forward(x), y)
            engine.backward(loss)
            engine.step()
        yield loss


def gan(start, net, data):
    judge = start(copy.deepcopy(net))
    engine, (x, y) = start(net), data[0]
    for _ in range(20):
        (judge.module if start is PyTorch else judge).zero_grad()
        judged = mse_loss(judge(engine(x).detach()), y)
        judge.backward(judged)
        judge.step()
        engine.backward(mse_loss(judge(engine(x)), y))
        engine.step()
        yield judged


def cached_loss(start, net, data):
    engine, (x, y) = start(net), data[0]

    def backwards(_):
        with torch.enable_grad():
            for part in (slice(16), slice(16, 32)):
                (mse_loss(engine(x[part]), y[part]) / 2).backward()

    for _ in range(20):
        with torch.no_grad():
            cached = mse_loss(engine(x), y)
        loss = 1.0 * cached.requires_grad_()
        loss.register_hook(backwards)
        engine.backward(loss)
        engine.step()
        yield loss


def no_sync(start, net, data):
    engine = start(net)
    for _ in range(20):
        for micro, (x, y) in enumerate(data):
            waits = start is DeepSpeed and micro < 3
            with engine.no_sync() if waits else contextlib.nullcontext():
                loss = mse_loss(engine(x), y) / 4
                engine.backward(loss)
        engine.step()
        yield loss


def block(start, net, data):
    engine = start(net)
    for _ in range(20):
        with engine.coalesce_grad_reduction() if start is DeepSpeed else contextlib.nullcontext():
            for x, y in data:
                loss = mse_loss(engine(x), y) / 4
                engine.backward(loss)
        engine.step()
        yield loss


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
