"""CUDA streams without CUDA: what is asked of them is written down, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Streams:
    """In the place of torch.cuda's. Kernels run at once, on a CPU, whatever stream is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._current: dict[torch.device, Stream] = {}
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.pause())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, by: self.record(by))
        self._entered: list[Stream] = []

    def current(self, device: torch.device) -> Stream:
        return self._current.setdefault(device, Stream(device, self.log))

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        self._entered.append(stream)
        yield
        self._entered.pop()

    def pause(self) -> None:
        self.log.append(("pause", self._entered[-1]))

    def record(self, stream: Stream) -> None:
        self.log.append(("record", stream))


class Stream:
    def __init__(self, device: torch.device, log: list[tuple[Any, ...]]) -> None:
        self.device = device
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(("wait", self, other))
