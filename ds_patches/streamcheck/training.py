"""The training: an MLP in stages, micro batches in chunks, and all of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ds_patches.streamcheck.lanes import Lanes


@dataclass(frozen=True)
class Work:
    """How much there is to do. Sizes differ from one tensor to the next, as memory blocks do."""

    widths: tuple[int, ...] = (512, 768, 640, 1024, 896)  # of layers, over and over
    rows: tuple[int, ...] = (192, 320, 256, 128, 384, 256, 192, 320)  # of chunks
    micro_batches: int = 5
    batches: int = 4

    def width(self, layer: int) -> int:
        return self.widths[layer % len(self.widths)]

    def chunks(self, micro: int) -> list[int]:
        """Return the rows of each chunk, in another order from micro batch to micro batch."""
        turned = micro % len(self.rows)
        return [*self.rows[turned:], *self.rows[:turned]]


@dataclass(frozen=True)
class Quantity:
    """A tensor that must be the same in every run."""

    batch: int
    name: str
    value: Tensor


class Training:
    """A model and its data on some devices, and as many runs from their start as are wanted."""

    def __init__(self, work: Work, devices: Sequence[torch.device], seed: int = 0) -> None:
        self._work = work
        torch.manual_seed(seed)
        self._start = [stage(work, place).to(device) for place, device in enumerate(devices)]
        into, out = work.width(0), work.width(2 * len(devices))
        self._data = [
            [
                (torch.randn(rows, into).to(devices[0]), torch.randn(rows, out).to(devices[-1]))
                for rows in [sum(work.rows)] * work.micro_batches
            ]
            for _ in range(work.batches)
        ]

    def run(self, lanes: Lanes) -> list[Quantity]:
        """Train. On a GPU nothing in here waits for it: what is returned may not be there yet."""
        stages = deepcopy(self._start)
        params = [param for one in stages for param in one.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        seen: list[Quantity] = []
        for batch, micro_batches in enumerate(self._data, 1):
            lanes.begin()
            for micro, (inputs, target) in enumerate(micro_batches):
                lanes.pace(micro)
                output = forward(stages, lanes, inputs, self._work.chunks(micro))
                mse_loss(output, target).backward()  # type: ignore[no-untyped-call, unused-ignore]
                name = f"the output of micro batch {micro + 1}"
                seen.append(Quantity(batch, name, output.detach()))
            grads = [param.grad for param in params if param.grad is not None]
            seen += _copies(batch, "the gradient of layer %d's %s", grads)
            optimizer.step()
            optimizer.zero_grad()
            seen += _copies(batch, "layer %d's %s after the step", params)
        return seen


def _copies(batch: int, name: str, values: Sequence[Tensor]) -> Iterator[Quantity]:
    """Copy what belongs to the parameters, the last layer's first, as the backward goes."""
    for place, value in reversed([*enumerate(values)]):
        layer, which = divmod(place, 2)
        whose = (layer + 1, ("weight", "bias")[which])
        yield Quantity(batch, name % whose, value.detach().clone())


def stage(work: Work, place: int) -> nn.Sequential:
    """Return two layers of the MLP.

    It is cut before an activation, which keeps its output and not its input: so a tensor that
    crosses is given up as soon as the next stage is queued.
    """
    first, second = (
        nn.Linear(work.width(layer), work.width(layer + 1)) for layer in (2 * place, 2 * place + 1)
    )
    for layer in (first, second):
        nn.init.xavier_normal_(layer.weight)
    activation = [nn.Tanh()] if place else []
    return nn.Sequential(*activation, first, nn.Tanh(), second)


def forward(
    stages: Sequence[nn.Module], lanes: Lanes, inputs: Tensor, chunks: Sequence[int]
) -> Tensor:
    """Chunk `c` is in stage `s` in tick `c + s`, and chunk `c + 1` in the stage before."""
    held = list(torch.split(inputs, list(chunks)))
    sources = (lanes.entry, *lanes.stages)
    for tick in range(len(held) + len(stages) - 1):
        for s in reversed(range(len(stages))):
            c = tick - s
            if 0 <= c < len(held):
                lane = lanes.stages[s]
                with lane.running():
                    held[c] = lane.give(stages[s](lane.take(held[c], sources[s])))
    return torch.cat([lanes.exit.take(chunk, sources[-1]) for chunk in held])
