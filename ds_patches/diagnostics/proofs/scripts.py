"""The functions of proofs on backwards, steps and engines; `compose` puts one into frame.py.

start: constructs an engine, DeepSpeed's or plain PyTorch's. net: a small model. data: four batches
of this rank. Further arguments are the options in proofs.json. Each function is a generator, or
returns an iterator, of the loss of each step.
"""

# ruff: noqa: B905
import contextlib
import copy
import itertools

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ds_patches.diagnostics.proofs.frame import DeepSpeed, PyTorch


class Around(nn.Module):
    """A model around a net, with another forward."""

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


def ordinary(start, net, data, micro_steps=1):
    engine = start(net, gradient_accumulation_steps=micro_steps)
    return train(engine, [(x.to(net[0].weight.dtype), y) for x, y in data[:micro_steps]])


def two_backwards(start, net, data):
    engine, (x, y) = start(net), data[0]
    for _ in range(20):
        out = engine(x)
        first, second = mse_loss(out[:, :8], y[:, :8]), mse_loss(out[:, 8:], y[:, 8:])
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        engine.step()
        yield first + second


def skipped_frame(start, net, data):
    eager = torch.compiler.disable(lambda net, x: net(x))
    engine = start(Around(net, lambda net, x: net[2](eager(net[:2], x))))
    if start is DeepSpeed:
        engine.compile()
    return train(engine, data[:1])


def forwards_first(start, net, data):
    engine = start(net)
    for _ in range(20):
        first, second = (mse_loss(engine(x), y) / 2 for x, y in data[:2])
        engine.backward(first)
        engine.backward(second)
        engine.step()
        yield first + second


def gradient_twice(start, net, data):
    def checkpointed(net, x):
        return checkpoint(net, x.requires_grad_(), use_reentrant=True)

    engine = start(Around(net, checkpointed))
    for _ in range(20):
        loss = sum(mse_loss(engine(x), y) for x, y in data[:2]) / 2
        engine.backward(loss)
        engine.step()
        yield loss


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
    if data[0][0].is_cpu:  # CPUs have no streams
        kind = type(deepspeed.get_accelerator())
        kind.Stream = property(lambda _: lambda **_: None)
    own = deepspeed.checkpointing.checkpoint if start is DeepSpeed else lambda run, x: run(x)
    model = Around(net, lambda net, x: net[2](own(net[:2], x.requires_grad_())))
    return two_backwards(start, model, data)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.base = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.base(x)
        parts = {"left": self.left(x), "right": self.right(x)}
        return parts.get(self.of, sum(parts.values()))


def towers(start, net, data, turns, **more):
    model = Towers()
    engine = start(model, **more)
    for turn in itertools.islice(itertools.cycle(turns), 20):  # the tower of each micro step
        losses = []
        for (x, y), model.of in zip(data, turn):
            losses.append(mse_loss(engine(x), y))
            engine.backward(losses[-1])
            engine.step()
        yield sum(losses)


def experts(start, net, data):
    turns = [["left"], ["right"]]
    return towers(start, net, data, turns[::-1] if dist.get_rank() else turns)


def for_causal_lm(net, x, labels):
    logits = net(x)  # the loss is computed from another output, as in transformers
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
