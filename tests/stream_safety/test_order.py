"""The rules, in plain PyTorch terms, on streams that run nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_patches.stream_safety.buffers import Buffers
from ds_patches.stream_safety.order import Order
from tests.stream_safety.clocks import Device, Stream


class Here(Device):
    """A device, and the order on it."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = Stream(name="reduction")
        accelerator = SimpleNamespace(current_stream=lambda index: self.current)
        self.order = Order(accelerator, self.reduction)

    def buffers(self, spare: int = 0) -> Buffers:
        return Buffers([torch.zeros(2), torch.zeros(2)], self.order, spare)

    def reduce(self, buffers: Buffers, index: int) -> int:
        """Queue the reduction of a buffer; return its number on the reduction stream."""
        self.order.reducing = True
        buffers[index]
        time = self.reduction.tick()
        self.order.reducing = False
        buffers.reduced()
        return time

    def memory_of_nine_turns(self, buffers: Buffers) -> int:
        """How many buffers they take, if each is reduced."""
        memory = set()
        for turn in range(9):
            memory.add(buffers[turn % 2].data_ptr())
            self.reduce(buffers, turn % 2)
        return len(memory)


@pytest.fixture
def here() -> Here:
    return Here()


def test_the_reduction_waits_for_every_gradient_and_for_no_more(here: Here) -> None:
    """Of a stream with one that is not settled yet, for all."""
    gradients, later = {}, {}
    for stream, settled in ((here.default, True), (Stream(), True), (Stream(), False)):
        with here.on(stream):
            here.order.produced(settled=True)
            gradients[stream] = stream.tick()
            here.order.produced(settled=settled)
        later[stream] = stream.tick()
    here.order.before_reduction()
    assert all(here.reduction.has_seen(*one) for one in gradients.items())
    assert [here.reduction.has_seen(*one) for one in later.items()] == [False, False, True]


def test_the_first_reduction_comes_after_the_step_before(here: Here) -> None:
    step = here.default.tick()
    here.order.backward_begins()
    here.order.before_reduction()
    assert here.reduction.has_seen(here.default, step)


def test_all_streams_meet(here: Here) -> None:
    other = Stream()
    with here.on(other):
        here.order.produced(settled=True)
    times = {stream: stream.tick() for stream in (here.default, other, here.reduction)}
    here.order.meet()
    for waiting in (here.default, other):
        assert all(waiting.has_seen(*one) for one in times.items())


def test_producers_of_the_last_backward_are_forgotten(here: Here) -> None:
    with here.on(Stream()) as _:
        here.order.produced(settled=False)
    here.order.backward_is_over()
    here.current = other = Stream()
    time = other.tick()
    here.order.before_reduction()
    assert not here.reduction.has_seen(other, time)


def test_the_host_keeps_no_more_than_one_backward_keeps(here: Here) -> None:
    gradient: Any = SimpleNamespace(nbytes=8, record_stream=lambda stream: None)
    done = []

    def backward(count: int) -> list[int]:
        """How many reductions the host has waited for, after each."""
        waited = []
        for _ in range(count):
            here.order.keep(gradient)
            done.append(here.reduction.tick())
            here.order.queued()
            waited.append(sum(here.host.get(here.reduction, 0) >= time for time in done))
        here.order.backward_is_over()
        return waited

    assert backward(2) == [0, 0]
    assert backward(2) == [1, 2]
    assert backward(3) == [3, 4, 4], "and now it is three"
    assert backward(1) == [5]


def test_who_writes_waits_for_the_last_reduction_of_this_buffer_alone(here: Here) -> None:
    buffers = here.buffers()
    first, second = here.reduce(buffers, 0), here.reduce(buffers, 1)
    buffers[0]
    assert here.default.has_seen(here.reduction, first)
    assert not here.default.has_seen(here.reduction, second)
    with here.on(Stream()):
        buffers[1]
        assert here.current.has_seen(here.reduction, second)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_who_writes_waits_for_the_buffer_reduced_longest_ago(here: Here, spare: int) -> None:
    buffers = here.buffers(spare)
    reductions, memory = [], set()
    for turn in range(9):
        memory.add(buffers[turn % 2].data_ptr())
        found = Buffers.all_of(buffers)
        assert {buffer.data_ptr() for buffer in found} == memory | {found[1].data_ptr()}
        assert len(found) == max(2, len(memory))
        seen = [here.default.has_seen(here.reduction, time) for time in reductions]
        assert seen == [at < turn - 1 - spare for at in range(turn)]
        reductions.append(here.reduce(buffers, turn % 2))
    assert len(memory) == 2 + spare


def test_an_empty_reduction_hands_nothing_on(here: Here) -> None:
    buffers = here.buffers()
    memory = [buffers[index].data_ptr() for index in (0, 1)]
    for _ in range(3):
        here.reduce(buffers, 0)  # the second time, nothing was written to it
    assert [buffers[index].data_ptr() for index in (0, 1, 0, 1)] == memory * 2


def test_where_memory_is_short_they_stay_two(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, asked = here.buffers(6), []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(args)
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    assert here.memory_of_nine_turns(buffers) == 2
    assert len(asked) == 1


def test_large_buffers_stay_two(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_patches.stream_safety.buffers.SPARE_BYTES", 15)
    assert here.memory_of_nine_turns(here.buffers(2)) == 3, "one more of 8 bytes, not two"


def test_a_buffer_is_waited_for_once(here: Here) -> None:
    buffers, waits = here.buffers(), []
    here.default.wait_event = waits.append  # type: ignore[method-assign]
    buffers[0]
    assert not waits, "it was allocated here"
    for count in (1, 2):
        here.reduce(buffers, 0)
        buffers[0]
        buffers[0]
        assert len(waits) == count


def test_a_new_buffer_is_waited_for_on_other_streams(here: Here) -> None:
    with here.on(Stream()):
        home, time = here.current, here.current.tick()
        buffers = here.buffers()
    buffers[0]
    assert here.default.has_seen(home, time)


@pytest.mark.parametrize("of", ["backward", "reduction"])
def test_nobody_waits_for_a_whole_stream_inside(here: Here, of: str) -> None:
    waiting, other = here.default, here.reduction
    if of == "reduction":
        waiting, other = other, waiting
    time = other.tick()
    with here.order.without_waits(backward=of == "backward", reduction=of == "reduction"):
        waiting.wait_stream(other)
        assert not waiting.has_seen(other, time)
        event = here.order.reduced()
    if of == "backward":
        event.wait(waiting)
        assert waiting.has_seen(other, time), "events of ours are real"
    time = other.tick()
    waiting.wait_stream(other)
    assert waiting.has_seen(other, time)


def test_the_real_streams_wait_by_what_is_changed_here() -> None:
    """``Stream.wait_stream(other)`` asks ``other.record_event()`` for the event to wait for."""
    asked = []
    other = SimpleNamespace(record_event=lambda: asked.append("event"))
    waiting = SimpleNamespace(wait_event=lambda event: asked.append("wait"))
    torch.cuda.Stream.wait_stream(waiting, other)  # type: ignore[arg-type]
    assert asked == ["event", "wait"]


def test_the_current_stream_is_that_of_the_reductions_device() -> None:
    asked: list[int] = []
    accelerator = SimpleNamespace(current_stream=asked.append)
    Order(accelerator, SimpleNamespace(device_index=3)).current()
    assert asked == [3]
