"""The pipelined training: against PyTorch without a pipeline, and which streams it would use."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from ds_patches.streamcheck import lanes
from ds_patches.streamcheck.comparison import first_difference
from ds_patches.streamcheck.training import Quantity, Training, Work
from tests.streamcheck.small import CPU, TWO, WORK
from tests.streamcheck.streams import Streams


def unpipelined(training: Training) -> list[torch.Tensor]:
    """Train the same model on the same data, a micro batch at a time."""
    model = nn.Sequential(*training._start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for micro_batches in training._data:
        for inputs, target in micro_batches:
            output = model(inputs)
            nn.functional.mse_loss(output, target).backward()
            seen.append(output.detach())
        params = list(model.parameters())[::-1]
        seen += [param.grad.clone() for param in params if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().clone() for param in params]
    return seen


def run(work: Work = WORK) -> tuple[list[Quantity], list[torch.Tensor]]:
    training = Training(work, CPU)
    return training.run(lanes.plain(CPU)), unpipelined(training)


def test_a_pipeline_of_one_chunk_is_plain_pytorch_to_the_bit() -> None:
    found, expected = run(replace(WORK, rows=(14,)))
    assert len(found) == len(expected) == 2 * (3 + 16 + 16)
    for quantity, tensor in zip(found, expected, strict=True):
        assert torch.equal(quantity.value, tensor), quantity.name


def test_chunks_change_no_more_than_the_order_of_sums() -> None:
    for quantity, tensor in zip(*run(), strict=True):
        torch.testing.assert_close(
            quantity.value, tensor, rtol=1e-5, atol=1e-6, msg=lambda text, q=quantity: q.name + text
        )


def test_every_run_begins_at_the_same_start() -> None:
    training = Training(WORK, CPU)
    first = training.run(lanes.plain(CPU))
    assert not first_difference(first, training.run(lanes.plain(CPU)))
    assert not first_difference(first, Training(WORK, CPU).run(lanes.plain(CPU)))
    assert first_difference(first, Training(WORK, CPU, seed=1).run(lanes.plain(CPU)))


def test_every_batch_trains_every_layer() -> None:
    training = Training(WORK, CPU)
    steps = [q.value for q in training.run(lanes.plain(CPU)) if "after the step" in q.name]
    before = [param for one in training._start for param in one.parameters()][::-1]
    assert len(before) == 16
    for old, new in zip([*before, *steps], steps, strict=False):
        assert not torch.equal(old, new)


def test_chunks_have_many_sizes() -> None:
    sizes = {rows * width for rows in Work().rows for width in Work().widths}
    assert len(Work().rows) == 8
    assert len(sizes) > 15
    # The caching allocator has other blocks from 1 MiB on.
    assert min(sizes) < 2**18 < max(sizes)


@pytest.mark.parametrize("fault", ["", *lanes.FAULTS])
def test_every_hand_over_waits_and_records(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    training = Training(WORK, TWO)
    expected = training.run(lanes.plain(TWO))
    streams = Streams(monkeypatch)
    streamed = lanes.streamed(TWO, fault)
    assert not first_difference(expected, training.run(streamed))

    stages = [lane.stream for lane in streamed.stages]
    readers = [lane.reader for lane in streamed.stages]
    homes = [streamed.entry.stream, streamed.exit.stream]
    assert len({*stages, *readers, *homes}) == 7, "all beside each other"
    assert [reader in stages for reader in readers] == [True, True, False, True]
    assert readers[2].device == stages[1].device, "a copy runs where it comes from"

    batches, takes = WORK.batches, WORK.batches * WORK.micro_batches * len(WORK.rows)
    crossings = [*zip([*readers, homes[1]], [homes[0], *stages], strict=True)]
    for reader, writer in crossings:
        wait, record = ("wait", reader, writer), ("record", reader)
        left_out = fault if reader is not homes[1] else ""
        # Stages also wait for the caller, once a batch.
        waits = streams.log.count(wait) - (batches if writer is homes[0] else 0)
        assert waits == (0 if left_out == "wait" else takes)
        assert streams.log.count(record) == (0 if left_out == "record" else takes)


def test_every_hand_over_has_a_slow_side_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    streamed = lanes.streamed(TWO)
    Training(replace(WORK, micro_batches=2, batches=1), TWO).run(streamed)
    paused = [stream for what, stream, *_ in streams.log if what == "pause"]
    places = []
    for stream in paused:
        (place,) = (
            s for s, lane in enumerate(streamed.stages) if stream in (lane.stream, lane.reader)
        )
        places.append(place)
    forward_and_backward = 2 * 4 * 2  # chunks, and slow stages
    assert set(places[:forward_and_backward]) == {1, 3}
    assert set(places[forward_and_backward:]) == {0, 2}
    assert len(places) == 2 * forward_and_backward
    reader = streamed.stages[1].reader
    wait = streams.log.index(("wait", reader, streamed.stages[0].stream))
    assert streams.log[wait : wait + 3] == [
        ("wait", reader, streamed.stages[0].stream),
        ("record", reader),
        ("pause", reader),
    ], "then it reads"


def test_what_crosses_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its memory is free for the next chunk, while its reader has yet to begin."""
    given, alive = [], []

    def give(lane: lanes.StreamLane, tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in given))
        given.append(weakref.ref(tensor))
        return give_of(lane, tensor)

    give_of = lanes.StreamLane.give
    Streams(monkeypatch)
    monkeypatch.setattr(lanes.StreamLane, "give", give)
    training, streamed = Training(replace(WORK, batches=1), CPU), lanes.streamed(CPU)
    training.run(streamed)
    assert len(alive) == 3 * 4 * 4, "micro batches, chunks, stages"
    chunks, stages = 4, 4
    assert max(alive) <= chunks + 1 < chunks * stages, "one for each chunk, and the one being read"


def test_stages_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk c of a stage is queued in the tick of chunk c + 1 of the stage before it."""
    streams = Streams(monkeypatch)
    streamed = lanes.streamed(CPU)
    Training(replace(WORK, micro_batches=1, batches=1), CPU).run(streamed)
    order = [lane.stream for lane in streamed.stages]
    seen = [order.index(e[1]) for e in streams.log if e[0] == "record" and e[1] in order]
    assert seen == [0, 1, 0, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 3, 2, 3]
