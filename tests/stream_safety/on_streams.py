"""An engine that trains on streams, as the race detector sees it. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.stream_safety.clocks import Device, Stream
from tests.stream_safety.races import detecting
from tests.training.options import Options, config
from tests.training.run import applied
from tests.training.surroundings import build_engine
from tests.training.trainers import EngineTrainer, PlainTrainer, worst_difference

BATCH, WIDTH = 4, 8
LAYERS = 11  # so that partitions end within one
WIDTHS = (WIDTH,) * (LAYERS + 1)
EXACT = 1e-6
BUCKET = 2 * WIDTH * WIDTH  # elements: two layers each, and more buckets than buffers


@dataclass
class Found:
    """What became of it."""

    races: list[str] = field(default_factory=list)
    difference: float = float("inf")  # of the parameters from plain PyTorch's
    end: float = 0.0  # of all that was given a length
    syncs: int = 0  # how often the host waited for the device
    #: Work of the reduction stream that the backward had waited for at its last gradient.
    seen: int = 0


class Layers(nn.Sequential):
    """In whatever dtype the engine has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self[0].weight.dtype)).float()


def model(widths: Sequence[int] = WIDTHS) -> nn.Module:
    """So deep that the first layers would have next to no gradient if each made it smaller."""
    torch.manual_seed(7)
    layers = [nn.Linear(*pair, bias=False) for pair in pairwise(widths)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return Layers(*(part for layer in layers for part in (layer, nn.Tanh())))


def batch(step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=source)


def steps(trainer: Any, count: int = 3, micro_steps: int = 1) -> None:
    for step in range(count * micro_steps):
        trainer.backward(trainer(batch(step)).square().mean())
        trainer.step()


def three_backwards(trainer: Any, step: int) -> None:
    for part in range(3):
        trainer.backward(trainer(batch(3 * step + part)).square().mean())


def coalesced(trainer: Any, micro_steps: int = 1, **window: bool) -> None:
    """Three backwards and one reduction in each step."""
    for step in range(3):
        with trainer.window(**window):
            three_backwards(trainer, step)
        trainer.step()


#: And one that has gathered all parameters.
gathered_once = partial(coalesced, gather_once=True)


def retained(trainer: Any, micro_steps: int = 1) -> None:
    """Two backwards over one forward in each step."""
    for step in range(3):
        out = trainer(batch(step))
        trainer.backward(out.square().mean(), retain_graph=True)
        trainer.backward(out.abs().mean())
        trainer.step()


def unmanaged(trainer: Any, micro_steps: int = 1) -> None:
    """Three backwards and a step that comes when it comes."""
    for step in range(3):
        three_backwards(trainer, step)
        trainer.step()


Script = Callable[..., None]
Around = Callable[[Device, Any], Any]


def on_a_side_stream(device: Device, engine: Any) -> Any:
    """The program computes on a stream of its own."""
    side = Stream(name="side")
    side.wait_stream(device.default)
    return device.on(side)


def from_several_streams(device: Device, engine: Any, since: int = 0) -> Any:
    """From a step on, each layer's gradient comes on one of three streams, as of compiled graphs.

    As autograd has it, the stream waits for what made the gradient, and keeps it; and at the end of
    the backward, after the gradient of the first layer, the program's stream waits for them all.
    """
    streams = [device.default, Stream(name="second"), Stream(name="third")]

    def hand_over(grad: torch.Tensor, at: int) -> None:
        if engine.global_steps < since:
            return
        if streams[at] is not device.default:
            streams[at].wait_stream(device.default)
            grad.record_stream(streams[at])
        device.current = streams[at]

    def back(*grads: Any, number: int) -> None:
        device.current = device.default
        for stream in streams[1:] if number == 0 else []:
            device.default.wait_stream(stream)

    nodes = []
    for number, param in enumerate(engine.module.parameters()):
        param.register_hook(lambda grad, at=number % 3: hand_over(grad, at))
        # Behind DeepSpeed's own hook, which is on this node or on what the node calls.
        nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(partial(back, number=number))
    return nullcontext(nodes)  # which must live as long as the hooks


def with_hooks_behind(device: Device, engine: Any) -> Any:
    """The program comes to each gradient after DeepSpeed, and writes it again."""

    def touch(param: torch.Tensor) -> None:
        if param.grad is not None:
            param.grad.mul_(1)

    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(touch)
    return nullcontext()


def in_checkpoints(device: Device, engine: Any) -> Any:
    """Two layers in each, and what is between them is computed again in the backward."""
    layers = list(engine.module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.to(layers[0].weight.dtype).requires_grad_()
        for at in range(0, len(layers), 4):
            x = checkpoint(nn.Sequential(*layers[at : at + 4]), x, use_reentrant=True)
        return x.float()

    engine.module.forward = forward
    return nullcontext()


#: What the program does of its own.
AROUND: dict[str, Around] = {
    "side": on_a_side_stream,
    "several": from_several_streams,
    "several later": partial(from_several_streams, since=1),
    "hooks": with_hooks_behind,
    "checkpoints": in_checkpoints,
}


def train(
    stage: int,
    parts: str = "",
    *,
    around: str = "",
    bucket: int = BUCKET,
    micro_steps: int = 1,
    script: Script = steps,
    beside: tuple[str, ...] = (),
    options: dict[str, str] | None = None,
    widths: Sequence[int] = WIDTHS,
    reduction: float = 0.0,
    settings: dict[str, Any] | None = None,
    **zero: Any,
) -> Found:
    """Train as plain PyTorch does, and look out for races.

    parts: of the patch; stock without any. beside: other patches, applied as well, with these
    options. reduction: how long that of a gradient takes, if what computes it takes 1.
    """
    start = model(widths)
    run = partial(script, micro_steps=micro_steps)
    plain = PlainTrainer(deepcopy(start), Options(micro_steps=micro_steps))
    run(plain)
    wanted = {"overlap_comm": True, "reduce_bucket_size": bucket, **zero}
    given = config(stage, micro_steps=micro_steps, zero=wanted, **(settings or {}))
    with detecting(partial(_length, reduction)) as (device, detector), ExitStack() as stack:
        for patch in beside:
            stack.enter_context(applied(patch, **(options or {})))
        if parts:
            stack.enter_context(applied("stream_safety", parts=parts))
        engine = build_engine(start, given)
        found = Found()
        _look(device, engine, found)
        inside = AROUND[around](device, engine) if around else nullcontext()
        trainer = EngineTrainer(engine)
        before = device.syncs
        with inside, detector:
            run(trainer)
        found.races, found.syncs = detector.races, device.syncs - before
        device.synchronize()
        found.end = device.end
        found.difference, _ = worst_difference(trainer.parameters(), plain.parameters())
    return found


def _length(reduction: float, name: str, args: Any) -> float:
    """Of matrix products and all-reduces; a weight's backward is two products."""
    if name == "aten::mm":
        left, right = args
        return float(left.numel() * right.shape[1])
    if name == "c10d::allreduce_":
        return reduction * sum(2 * BATCH * tensor.numel() for tensor in args[0])
    return 0.0


def _look(device: Device, engine: Any, found: Found) -> None:
    reduction = getattr(engine.optimizer, "reduction_stream", None)

    def look(grad: torch.Tensor) -> None:
        found.seen = device.default.clock.get(reduction, 0)

    next(engine.module.parameters()).register_hook(look)


def watches_gradients(parts: str, around: str) -> list[bool]:
    """Whether the patch looks at each gradient: before the first step, and after each of two."""
    from ds_patches.stream_safety.upstream import flat

    given = config(2, zero={"overlap_comm": True, "reduce_bucket_size": BUCKET})
    with detecting() as (device, _), applied("stream_safety", parts=parts):
        engine = build_engine(model(), given)
        own = vars(engine.optimizer)
        found = [flat.GRADIENT_METHOD in own]
        with AROUND[around](device, engine) if around else nullcontext():
            for step in range(2):
                engine.backward(engine(batch(step)).square().mean())
                engine.step()
                found.append(flat.GRADIENT_METHOD in own)
    return found
