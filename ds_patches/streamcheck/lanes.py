"""Where the stages of a pipeline run, and how a tensor is handed from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

#: What a hand-over can leave out, to see that it is missed then.
FAULTS = ("record", "wait")
#: Clock cycles of a GPU: about a millisecond, for many times longer than a stage computes.
PAUSE = 2_000_000


class Lane:
    """A device. All lanes of it run one after the other, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Let what the caller has queued come first: it has set the parameters."""

    def pace(self, slow: bool) -> None:
        """Let this lane fall behind the others from now on, or not."""

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def take(self, tensor: Tensor, source: Lane) -> Tensor:
        """Hand over what `source` has computed."""
        return tensor.to(self.device)

    def give(self, tensor: Tensor) -> Tensor:
        """Let a tensor go that this lane has computed."""
        return tensor


class StreamLane(Lane):
    """A stream, beside those of other lanes.

    `reader` is the stream that reads what is handed over. A copy between devices runs on one of the
    device that it comes from; on one device nothing is copied, and the lane reads by itself.
    """

    def __init__(
        self, stream: torch.cuda.Stream, reader: torch.cuda.Stream | None = None, fault: str = ""
    ) -> None:
        super().__init__(stream.device)
        self.stream = stream
        self.reader = stream if reader is None else reader
        self._fault = fault
        self._slow = False

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def pace(self, slow: bool) -> None:
        self._slow = slow

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def take(self, tensor: Tensor, source: Lane) -> Tensor:
        assert isinstance(source, StreamLane)
        if self._fault != "wait":
            self.reader.wait_stream(source.stream)
        if self._fault != "record":
            tensor.record_stream(self.reader)
        if self._slow:
            _pause(self.reader)
        with torch.cuda.stream(self.reader), torch.cuda.stream(self.stream):
            return tensor.to(self.device)

    def give(self, tensor: Tensor) -> Tensor:
        if self._slow:  # then also in the backward, before it reads the gradient of this
            tensor.register_hook(lambda _: _pause(self.stream))  # type: ignore[no-untyped-call, unused-ignore]
        return tensor


def _pause(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call, unused-ignore]


@dataclass(frozen=True)
class Lanes:
    """One for each stage, and those of the caller: where batches come from and outputs go to."""

    entry: Lane
    stages: tuple[Lane, ...]
    exit: Lane

    def begin(self) -> None:
        for lane in self.stages:
            lane.begin()

    def pace(self, turn: int) -> None:
        """Let every other stage fall behind, in turns.

        Each hand-over then has a slow reader, whose tensor is given up long before it is read, and
        in the next turn a slow writer, whose tensor is taken long before it is written.
        """
        for place, lane in enumerate(self.stages):
            lane.pace((place + turn) % 2 == 1)


def plain(devices: Sequence[torch.device]) -> Lanes:
    """Stages on these devices, without streams of their own."""
    first, *_, last = devices
    return Lanes(Lane(first), tuple(map(Lane, devices)), Lane(last))


def streamed(devices: Sequence[torch.device], fault: str = "") -> Lanes:
    """Stages on these devices, each on a stream of its own."""
    first, *_, last = devices
    stages = []
    for before, device in zip([first, *devices], devices, strict=False):
        reader = None if before == device else _stream(before)
        stages.append(StreamLane(_stream(device), reader, fault))
    entry, leave = (StreamLane(torch.cuda.current_stream(device)) for device in (first, last))
    return Lanes(entry, tuple(stages), leave)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
