"""The rules, in plain PyTorch terms, on streams that run nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_patches.stream_safety.buffers import Buffers
from ds_patches.stream_safety.order import Order
from tests.stream_safety.clocks import Device, Stream


@pytest.fixture
def device() -> Device:
    return Device()


def order_on(device: Device) -> tuple[Order, Stream]:
    reduction = Stream(name="reduction")
    accelerator = SimpleNamespace(current_stream=lambda index: device.current)
    return Order(accelerator, reduction), reduction


def reduce(order: Order, buffers: Buffers, index: int, reduction: Stream) -> int:
    """Queue the reduction of a buffer; return its number on the reduction stream."""
    order.reducing = True
    buffers[index]
    time = reduction.tick()
    order.reducing = False
    buffers.reduced()
    return time


def test_the_reduction_waits_for_every_producer(device: Device) -> None:
    order, reduction = order_on(device)
    work = {}
    for stream in (device.default, Stream(), Stream()):
        with device.on(stream):
            work[stream] = stream.tick()
            order.produced(settled=False)
    order.before_reduction()
    assert all(reduction.has_seen(stream, time) for stream, time in work.items())


def test_it_waits_for_no_more_than_the_gradient(device: Device) -> None:
    order, reduction = order_on(device)
    gradient = device.default.tick()
    order.produced(settled=True)
    later = device.default.tick()
    order.before_reduction()
    assert reduction.has_seen(device.default, gradient)
    assert not reduction.has_seen(device.default, later)


def test_what_is_not_settled_yet_is_waited_for(device: Device) -> None:
    order, reduction = order_on(device)
    order.produced(settled=True)
    order.produced(settled=False)
    later = device.default.tick()
    order.before_reduction()
    assert reduction.has_seen(device.default, later)


def test_the_first_reduction_comes_after_the_step_before(device: Device) -> None:
    order, reduction = order_on(device)
    step = device.default.tick()
    order.backward_begins()
    order.before_reduction()
    assert reduction.has_seen(device.default, step)


def test_all_streams_meet(device: Device) -> None:
    order, reduction = order_on(device)
    other = Stream()
    with device.on(other):
        order.produced(settled=True)
    times = {stream: stream.tick() for stream in (device.default, other, reduction)}
    order.meet()
    for waiting in (device.default, other):
        assert all(waiting.has_seen(stream, time) for stream, time in times.items())


def test_producers_of_the_last_backward_are_forgotten(device: Device) -> None:
    order, reduction = order_on(device)
    with device.on(Stream()) as _:
        order.produced(settled=False)
    order.backward_is_over()
    device.current = other = Stream()
    time = other.tick()
    order.before_reduction()
    assert not reduction.has_seen(other, time)


def test_the_host_keeps_no_more_than_one_backward_keeps(device: Device) -> None:
    order, reduction = order_on(device)
    gradient: Any = SimpleNamespace(nbytes=8, record_stream=lambda stream: None)
    done = []

    def backward(count: int) -> list[int]:
        """How many reductions the host has waited for, after each."""
        waited = []
        for _ in range(count):
            order.keep(gradient)
            done.append(reduction.tick())
            order.queued()
            waited.append(sum(device.host.get(reduction, 0) >= time for time in done))
        order.backward_is_over()
        return waited

    assert backward(2) == [0, 0]
    assert backward(2) == [1, 2]
    assert backward(3) == [3, 4, 4], "and now it is three"
    assert backward(1) == [5]


def test_who_writes_waits_for_the_last_reduction_of_this_buffer_alone(device: Device) -> None:
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order)
    first = reduce(order, buffers, 0, reduction)
    second = reduce(order, buffers, 1, reduction)
    buffers[0]
    assert device.default.has_seen(reduction, first)
    assert not device.default.has_seen(reduction, second)
    with device.on(Stream()):
        buffers[1]
        assert device.current.has_seen(reduction, second)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_who_writes_waits_for_the_buffer_reduced_longest_ago(device: Device, spare: int) -> None:
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order, spare)
    reductions, memory = [], set()
    for turn in range(9):
        memory.add(buffers[turn % 2].data_ptr())
        found = Buffers.all_of(buffers)
        assert {buffer.data_ptr() for buffer in found} == memory | {found[1].data_ptr()}
        assert len(found) == max(2, len(memory))
        seen = [device.default.has_seen(reduction, time) for time in reductions]
        assert seen == [at < turn - 1 - spare for at in range(turn)]
        reductions.append(reduce(order, buffers, turn % 2, reduction))
    assert len(memory) == 2 + spare


def test_what_is_reduced_is_what_was_written(device: Device) -> None:
    order, _ = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order, 2)
    for turn in range(9):
        written = buffers[turn % 2]
        order.reducing = True
        assert buffers[turn % 2] is written
        order.reducing = False
        buffers.reduced()


def test_an_empty_reduction_hands_nothing_on(device: Device) -> None:
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order)
    memory = [buffers[index].data_ptr() for index in (0, 1)]
    for _ in range(3):
        reduce(order, buffers, 0, reduction)  # the second time, nothing was written to it
    assert [buffers[index].data_ptr() for index in (0, 1, 0, 1)] == memory * 2


def how_many_are_used(order: Order, buffers: Buffers, reduction: Stream) -> int:
    """In nine turns, each of which is reduced."""
    memory = set()
    for turn in range(9):
        memory.add(buffers[turn % 2].data_ptr())
        reduce(order, buffers, turn % 2, reduction)
    return len(memory)


def test_where_memory_is_short_they_stay_two(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(args)
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order, 6)
    assert how_many_are_used(order, buffers, reduction) == 2
    assert len(asked) == 1


def test_large_buffers_stay_two(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_patches.stream_safety.buffers.SPARE_BYTES", 15)
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2), torch.zeros(2)], order, 2)
    assert how_many_are_used(order, buffers, reduction) == 3, "one more of 8 bytes, not two"


def test_a_buffer_is_waited_for_once(device: Device) -> None:
    order, reduction = order_on(device)
    buffers = Buffers([torch.zeros(2)], order)
    waits: list[object] = []
    device.default.wait_event = waits.append  # type: ignore[method-assign]
    buffers[0]
    assert not waits, "it was allocated here"
    reduce(order, buffers, 0, reduction)
    buffers[0]
    buffers[0]
    assert len(waits) == 1
    reduce(order, buffers, 0, reduction)
    buffers[0]
    assert len(waits) == 2


def test_a_new_buffer_is_waited_for_on_other_streams(device: Device) -> None:
    order, _ = order_on(device)
    device.current = home = Stream()
    time = home.tick()
    buffers = Buffers([], order)
    buffers.append(torch.zeros(2))
    device.current = device.default
    buffers[0]
    assert device.default.has_seen(home, time)


def test_nobody_waits_for_the_reduction_stream_inside(device: Device) -> None:
    order, reduction = order_on(device)
    time = reduction.tick()
    with order.without_waits(backward=True, reduction=False):
        device.default.wait_stream(reduction)
        assert not device.default.has_seen(reduction, time)
        event = order.reduced()
    event.wait(device.default)
    assert device.default.has_seen(reduction, time), "events of ours are real"
    time = reduction.tick()
    device.default.wait_stream(reduction)
    assert device.default.has_seen(reduction, time)


def test_the_reduction_stream_waits_for_nobody_inside(device: Device) -> None:
    order, reduction = order_on(device)
    time = device.default.tick()
    with order.without_waits(backward=False, reduction=True):
        reduction.wait_stream(device.default)
        assert not reduction.has_seen(device.default, time)
    reduction.wait_stream(device.default)
    assert reduction.has_seen(device.default, time)


def test_the_real_streams_wait_by_what_is_changed_here() -> None:
    """``Stream.wait_stream(other)`` asks ``other.record_event()`` for the event to wait for."""
    asked = []
    other = SimpleNamespace(record_event=lambda: asked.append("event"))
    waiting = SimpleNamespace(wait_event=lambda event: asked.append("wait"))
    torch.cuda.Stream.wait_stream(waiting, other)  # type: ignore[arg-type]
    assert asked == ["event", "wait"]


def test_a_plain_list_comes_back(device: Device) -> None:
    order, _ = order_on(device)
    tensors = [torch.zeros(2), torch.ones(2)]
    plain = Buffers(tensors, order).plain()
    assert type(plain) is list
    assert all(one is other for one, other in zip(plain, tensors, strict=True))


def test_the_current_stream_is_that_of_the_reductions_device(device: Device) -> None:
    asked: list[int] = []
    accelerator = SimpleNamespace(current_stream=asked.append)
    Order(accelerator, SimpleNamespace(device_index=3)).current()
    assert asked == [3]
