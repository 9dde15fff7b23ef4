"""The rules, in plain PyTorch terms, on streams that run nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_patches.stream_safety.order import Order
from tests.stream_safety.clocks import Device, Stream


class Here(Device):
    """A device, and the order on it."""

    def __init__(self, waits_for_all: bool) -> None:
        super().__init__()
        self.reduction = Stream(name="reduction")
        accelerator = SimpleNamespace(current_stream=lambda index: self.current)
        self.filled: set[Stream] = set()  # of the one bucket
        self.order = Order(accelerator, self.reduction, [self.filled] * waits_for_all)

    def gradient(self, stream: Stream, task_id: int = 0) -> int:
        """One comes on this stream; return the number of its work there."""
        with self.on(stream):
            self.order.learn(task_id)
            return stream.tick()

    def reduce(self) -> int:
        """Queue a reduction; return its number."""
        self.order.before_reduction()
        return self.reduction.tick()


@pytest.fixture(params=[False, True], ids=["to 0.19.2", "0.19.3"])
def here(request: pytest.FixtureRequest) -> Here:
    return Here(request.param)


def test_the_reduction_waits_for_every_gradient(here: Here) -> None:
    """From 0.19.3 on DeepSpeed has it do so."""
    others = {stream: here.gradient(stream) for stream in (Stream(), Stream())}
    here.gradient(here.default)
    here.reduce()
    seen = [here.reduction.has_seen(*one) for one in others.items()]
    assert seen == [not here.order.waits_for_all] * 2


def test_who_writes_waits_for_all_reductions_but_the_last(here: Here) -> None:
    """Of two buffers, the last one reduces what is not written next."""
    other = Stream()
    here.gradient(other)
    here.gradient(here.default)
    first, second = here.reduce(), here.reduce()
    assert other.has_seen(here.reduction, first)
    assert not other.has_seen(here.reduction, second)


def test_a_new_stream_comes_after_all_that_was_done(here: Here) -> None:
    time, reduced, new = here.gradient(here.default), here.reduce(), Stream()
    assert here.order.has_one_stream
    here.gradient(new)
    assert new.has_seen(here.default, time)
    assert new.has_seen(here.reduction, reduced)
    assert not here.order.has_one_stream


def test_the_buffers_of_a_backward_are_allocated_on_its_first_stream(here: Here) -> None:
    """The others wait for that, once."""
    first, other = Stream(), Stream()
    here.gradient(other)
    here.gradient(first)
    allocated = first.tick()
    later = here.gradient(first, task_id=1)
    assert other.has_seen(first, allocated)
    here.gradient(other, task_id=1)
    assert not other.has_seen(first, later)


def test_a_bucket_tells_of_streams(here: Here) -> None:
    here.gradient(here.default)
    here.filled.add(here.default)
    assert not here.order.meets_a_new_stream()
    here.filled.add(Stream())
    assert here.order.meets_a_new_stream() == here.order.waits_for_all


def test_the_current_stream_is_that_of_the_reductions_device() -> None:
    asked: list[int] = []
    accelerator = SimpleNamespace(current_stream=asked.append)
    Order(accelerator, SimpleNamespace(device_index=3), []).current()
    assert asked == [3]
