"""An engine that trains on streams, as the race detector sees it. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.stream_safety.clocks import Device, Stream
from tests.stream_safety.races import Detector, detecting
from tests.zero3_retain import trainers
from tests.zero3_retain.cases import applied

WIDTH = 8
LAYERS = 6
BUCKET = 2 * WIDTH * WIDTH  # elements: two layers each


@dataclass
class Found:
    """What became of it."""

    races: list[str] = field(default_factory=list)
    difference: float = float("inf")  # of the parameters from plain PyTorch's
    waits: int = 0  # of the backward for the whole reduction stream


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def batch(step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=source)


def steps(trainer: Any, count: int = 3, micro_steps: int = 1) -> None:
    for step in range(count * micro_steps):
        trainer.backward(trainer.forward(batch(step)).square().mean())
        trainer.step()


Around = Callable[[Device, Any], Any]


def on_a_side_stream(device: Device, engine: Any) -> Any:
    """The program computes on a stream of its own."""
    side = Stream(name="side")
    side.wait_stream(device.default)
    return device.on(side)


def from_several_streams(device: Device, engine: Any) -> Any:
    """Each layer's gradient is handed over on one of three streams, as compiled graphs do.

    The stream waits for what made the gradient, and keeps it, as autograd has it do.
    """
    streams = [device.default, Stream(name="second"), Stream(name="third")]

    def hand_over(grad: torch.Tensor, at: int) -> None:
        if streams[at] is not device.default:
            streams[at].wait_stream(device.default)
            grad.record_stream(streams[at])
        device.current = streams[at]

    def back(*grads: Any) -> None:
        device.current = device.default

    nodes = []
    for number, param in enumerate(engine.module.parameters()):
        param.register_hook(lambda grad, at=number % 3: hand_over(grad, at))
        # Behind DeepSpeed's own hook, which is on this node or on what the node calls.
        nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(back)
    return nullcontext(nodes)


def train(
    stage: int,
    *,
    patch: bool,
    parts: str = "all",
    around: Around | None = None,
    bucket: int = BUCKET,
    micro_steps: int = 1,
    overlap: bool = True,
    settings: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
) -> Found:
    start = model()
    expected = trainers.plain(start, lambda t: steps(t, micro_steps=micro_steps), micro_steps)
    wanted = {"overlap_comm": overlap, "reduce_bucket_size": bucket, **(zero or {})}
    config = trainers.config(stage, micro_steps=micro_steps, zero=wanted, **(settings or {}))
    with detecting() as (device, detector):
        with applied("stream_safety", parts=parts) if patch else nullcontext():
            engine = trainers.build_engine(start, config)
            trainer = trainers.EngineTrainer(engine)
            with around(device, engine) if around else nullcontext() as alive:  # noqa: F841
                _watched(trainer, device, detector, micro_steps)
            found = Found(detector.races)
            device.synchronize()
            found.difference, _ = trainers.worst_difference(trainer.parameters(), expected)
    return found


def _watched(trainer: Any, device: Device, detector: Detector, micro_steps: int) -> None:
    with detector:
        steps(trainer, micro_steps=micro_steps)
