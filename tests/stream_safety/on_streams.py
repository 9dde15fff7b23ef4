"""An engine that trains on streams, as the race detector sees it. Runs on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import STREAMS, Options, Outcome, Script, build_engine, config, run
from tests.stream_safety.clocks import Device, Stream
from tests.stream_safety.races import detecting

WIDTH = 8
LAYERS = 11  # so that partitions end within one
EXACT = 1e-6
BUCKET = 2 * WIDTH * WIDTH  # elements: two layers each, and more buckets than buffers
OVERLAPPED = {"overlap_comm": True, "reduce_bucket_size": BUCKET}


class Layers(nn.Sequential):
    """In whatever dtype the engine has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self[0].weight.dtype)).float()


def model() -> nn.Module:
    """So deep that the first layers would have next to no gradient if each made it smaller."""
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return Layers(*(part for layer in layers for part in (layer, nn.Tanh())))


def batch(step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=source)


def steps(trainer: Any) -> None:
    for step in range(trainer.count * trainer.options.micro_steps):
        trainer.backward(trainer(batch(step)).square().mean())
        trainer.step()


def three_backwards(trainer: Any, step: int) -> None:
    for part in range(3):
        trainer.backward(trainer(batch(3 * step + part)).square().mean())


def coalesced(trainer: Any, step: int) -> None:
    with trainer.window():
        three_backwards(trainer, step)


def retained(trainer: Any, step: int) -> None:
    out = trainer(batch(step))
    trainer.backward(out.square().mean(), retain_graph=True)
    trainer.backward(out.abs().mean())


def on_a_side_stream(device: Device, engine: Any) -> Any:
    side = Stream(name="side")
    side.wait_stream(device.default)
    return device.on(side)


def from_several_streams(device: Device, engine: Any, since: int = 0) -> Any:
    """From a step on, each layer's gradient comes on one of three streams, as of compiled graphs.

    As autograd has it, the stream waits for what made the gradient, and keeps it; and at the end of
    the backward, after the gradient of the first layer, the program's stream waits for them all.
    """
    streams = [device.default, Stream(name="second"), Stream(name="third")]

    def hand_over(grad: torch.Tensor, index: int) -> None:
        if engine.global_steps < since:
            return
        if streams[index] is not device.default:
            streams[index].wait_stream(device.default)
            grad.record_stream(streams[index])
        device.current = streams[index]

    def back(*grads: Any, number: int) -> None:
        device.current = device.default
        for stream in streams[1:] if number == 0 else []:
            device.default.wait_stream(stream)

    nodes = []
    for number, param in enumerate(engine.module.parameters()):
        param.register_hook(partial(hand_over, index=number % 3))
        # Behind DeepSpeed's own hook, which is on this node or on what the node calls.
        nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(partial(back, number=number))
    return nullcontext(nodes)  # which must live as long as the hooks


def touch(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(1)


def with_hooks_behind(device: Device, engine: Any) -> Any:
    """The program comes to each gradient after DeepSpeed, and writes it again."""
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(touch)
    return nullcontext()


def in_checkpoints(device: Device, engine: Any) -> Any:
    """Two layers in each, and what is between them is computed again in the backward."""
    layers = list(engine.module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.to(layers[0].weight.dtype).requires_grad_()
        for index in range(0, len(layers), 4):
            x = checkpoint(nn.Sequential(*layers[index : index + 4]), x, use_reentrant=True)
        return x.float()

    engine.module.forward = forward
    return nullcontext()


#: What the program does of its own.
AROUND: dict[str, Callable[[Device, Any], Any]] = {
    "": lambda device, engine: nullcontext(),
    "side": on_a_side_stream,
    "several": from_several_streams,
    "several later": partial(from_several_streams, since=1),
    "hooks": with_hooks_behind,
    "checkpoints": in_checkpoints,
}


def train(
    stage: int,
    *,
    patched: bool = False,
    around: str = "",
    bucket: int = BUCKET,
    micro_steps: int = 1,
    script: Script = steps,
    beside: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    **zero: Any,
) -> Outcome:
    """Train as plain PyTorch does, and look out for races.

    beside: other patches, applied as well.
    """

    def within(trainer: Any) -> None:
        if not trainer.is_engine:
            return trainer.train(script)
        with AROUND[around](Stream.device, trainer.engine):
            trainer.note()  # its hooks may stay
            return trainer.train(script)

    wanted = {**OVERLAPPED, "reduce_bucket_size": bucket, **zero}
    options = Options(
        stage, "streams", micro_steps=micro_steps, zero=wanted, settings=settings or {}
    )
    return run(within, options, *("stream_safety",) * patched, *beside, on=STREAMS)


@contextmanager
def engine_on_streams(around: str = "") -> Iterator[Any]:
    with detecting() as (device, _):
        engine = build_engine(model(), config(2, zero=OVERLAPPED))
        with AROUND[around](device, engine):
            yield engine
