"""Streams that run nothing: each only knows which work of the others is done before its own.

A vector clock for each stream says so. Recording an event keeps the clock, waiting for the event
takes it over, and whatever the host waits for comes before all that it queues afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Clock = dict["Stream", int]


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self._clock = dict((stream or Stream.device.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        _join((stream or Stream.device.current).clock, self._clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Stream.device.host_waits_for(self._clock)


class Stream:
    """As ``torch.cuda.Stream`` is used."""

    device: Device

    def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
        self.name = name or f"stream {len(self.device.streams)}"
        self.clock: Clock = {self: 0}
        # What the host has waited for by now comes before all that this stream will do.
        _join(self.clock, self.device.host)
        self.device.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> int:
        """One more piece of work; return its number on this stream."""
        self.clock[self] += 1
        return self.clock[self]

    def has_seen(self, other: Stream, time: int) -> bool:
        return self.clock.get(other, 0) >= time

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.host_waits_for(self.clock)


class Device:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        Stream.device = self
        self.default = self.current = Stream(name="default")

    def host_waits_for(self, clock: Clock) -> None:
        _join(self.host, clock)
        for stream in self.streams:
            _join(stream.clock, self.host)

    def synchronize(self, *args: Any) -> None:
        for stream in self.streams:
            self.host_waits_for(stream.clock)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before
