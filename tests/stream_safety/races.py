"""A race detector: which tensors are touched by two streams that do not wait for each other.

Real code runs on the CPU while the accelerator of DeepSpeed hands out the streams of `clocks`.
Every operator is noted with the current stream and the bytes that it reads and writes. Two
accesses of the same bytes, one of them a write, are a race if neither stream waits for the other.
Memory that is freed goes back to the stream that it was allocated on, as PyTorch's allocator does
it: the next work there is a race with every access that it has not waited for, unless the memory
was recorded on the stream of that access.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.stream_safety.clocks import Device, Event, Stream

#: The host waits for their result.
_READ_BY_THE_HOST = ("_local_scalar_dense", "equal", "is_nonzero", "item")


@dataclass(frozen=True)
class Access:
    stream: Stream
    time: int
    writes: bool
    begin: int  # bytes of the storage
    end: int
    operator: str

    def conflicts(self, other: Access) -> bool:
        apart = self.end <= other.begin or other.end <= self.begin
        return (self.writes or other.writes) and not apart

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.operator} on {self.stream}"


class Detector(TorchDispatchMode):
    """Notes every access; `races` says what is wrong."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by storage
        self._homes: dict[int, Stream] = {}
        self._recorded: dict[int, set[Stream]] = defaultdict(set)
        self._freed: dict[Stream, list[Access]] = defaultdict(list)
        self.races: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        read = _tensors((args, kwargs))
        if not _is_view(func):
            self._note(name, read, _written(func, args, kwargs))
        if any(word in name for word in _READ_BY_THE_HOST):
            self._device.current.synchronize()
        result = func(*args, **kwargs)
        known = {_key(tensor) for tensor in read}
        self._note(name, [], [tensor for tensor in _tensors(result) if _key(tensor) not in known])
        return result

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """In place of ``tensor.record_stream``."""
        self._recorded[_key(tensor)].add(stream)

    def _note(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        current = self._device.current
        if not read and not written:
            return
        time = current.tick()
        for access in self._freed.pop(current, []):
            if not current.has_seen(access.stream, access.time):
                self.races.append(f"{access}, freed for {current} before that is done")
        for tensors, writes in ((read, False), (written, True)):
            for tensor in filter(torch.Tensor.numel, tensors):
                access = Access(current, time, writes, *_bytes(tensor), name)
                self._check(_key(tensor), access)
                self._watch(tensor)

    def _check(self, key: int, now: Access) -> None:
        left = []
        for then in self._accesses[key]:
            seen = now.stream.has_seen(then.stream, then.time)
            if then.conflicts(now) and not seen:
                self.races.append(f"{then}, then {now}")
            # What a write has seen and covers is of no more interest.
            covered = now.writes and now.begin <= then.begin and then.end <= now.end
            if not (covered and seen):
                left.append(then)
        left.append(now)
        self._accesses[key] = left

    def _watch(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._homes:
            self._homes[key] = self._device.current
            weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        home, recorded = self._homes.pop(key), self._recorded.pop(key, set())
        self._freed[home] += [
            access
            for access in self._accesses.pop(key, [])
            if access.stream is not home and access.stream not in recorded
        ]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    if func.namespace == "c10d":  # collectives say nothing of it, and write what comes first
        return _tensors(args[0])
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


def _is_view(func: Any) -> bool:
    """Return True if an operator touches no memory."""
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    begin = tensor.storage_offset()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


@contextmanager
def detecting() -> Iterator[tuple[Device, Detector]]:
    """DeepSpeed's accelerator has streams inside, and what goes wrong on them is found out."""
    from deepspeed.accelerator import get_accelerator

    device = Device()
    detector = Detector(device)
    accelerator = get_accelerator()
    fakes: dict[str, Any] = {
        "resolves_data_dependency": lambda: False,
        "is_synchronized_device": lambda: False,
        "current_stream": lambda *index: device.current,
        "default_stream": lambda *index: device.default,
        "stream": device.on,
        "synchronize": device.synchronize,
    }
    with ExitStack() as stack:
        for owner, name, fake in (
            *((accelerator, name, fake) for name, fake in fakes.items()),
            (type(accelerator), "Stream", Stream),
            (type(accelerator), "Event", Event),
            (torch.Tensor, "record_stream", lambda tensor, stream: detector.record(tensor, stream)),
        ):
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield device, detector
