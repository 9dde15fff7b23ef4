"""Gradients reduced straight into each rank's flat partition: plain PyTorch, no DeepSpeed.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one equal partition
per rank. A rank needs the reduced gradients of its own partition and of nothing else, so a
reduce-scatter fills the same chunk of every rank's partition: all ranks send and receive all the
time, and half of the bytes of the all-reduce that upstream flushes by.

What comes out equals DeepSpeed's own reduction to the bit on two ranks, where a sum has one order:
gradients are divided by the number of ranks first and summed in the communication dtype. It may be
more exact where that is wider than DeepSpeed's buckets, which round once more. With more ranks a
backend may sum in another order, so the two agree within rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: with several chunks, one is packed while the one before is on the wire.
_LONGEST_CHUNK = 1 << 25


@dataclass(frozen=True)
class FlatGroup:
    """Parameters laid end to end; gaps between them and after the last are padding."""

    params: Sequence[torch.Tensor]
    offsets: Sequence[int]  # where each begins, ascending, in elements
    partition: torch.Tensor  # this rank's share, 1-D, as long as any other; all of it is written

    def slices(self, start: int, end: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """What lies in `start` to `end`, in flat order.

        A parameter, where in it and where in that range its part begins, and the part's length.
        """
        first = max(bisect_right(self.offsets, start) - 1, 0)
        for index in range(first, len(self.params)):
            param, offset = self.params[index], self.offsets[index]
            if offset >= end:
                return
            low, high = max(start, offset), min(end, offset + param.numel())
            if low < high:
                yield param, low - offset, low - start, high - low


class Piece(NamedTuple):
    """A range of every rank's partition of one group, in elements."""

    group: int
    start: int
    length: int


Chunk = tuple[Piece, ...]


@dataclass(frozen=True)
class FlatLayout:
    """What there is to reduce, and how."""

    groups: Sequence[FlatGroup]
    process_group: Any
    comm_dtype: torch.dtype
    bucket_elements: int  # what one staging buffer may hold
    gradient: Callable[[torch.Tensor], torch.Tensor | None]  # of a parameter; None counts as zeros
    note_read: Callable[[torch.Tensor], None]  # of a gradient, by the stream that reduces

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    def chunks(self, longest: int) -> list[Chunk]:
        """All partitions in chunks of up to `longest` elements.

        A chunk is filled up from the next group, so that many small groups do not become many
        small collectives.
        """
        chunks: list[Chunk] = []
        pieces: list[Piece] = []
        room = longest
        for index, group in enumerate(self.groups):
            start, size = 0, group.partition.numel()
            while start < size:
                piece = Piece(index, start, min(size - start, room))
                pieces.append(piece)
                start += piece.length
                room -= piece.length
                if not room:
                    chunks.append(tuple(pieces))
                    pieces, room = [], longest
        if pieces:
            chunks.append(tuple(pieces))
        return chunks


def _length_of(chunk: Chunk) -> int:
    """In elements, of one rank's share."""
    return sum(piece.length for piece in chunk)


class _Lane:
    """One of two staging buffers, and the collective that has it in use.

    chunk: whose gradients are in it. rows: they themselves, [ranks, length of the chunk].
    """

    chunk: Chunk
    rows: torch.Tensor

    def __init__(self, layout: FlatLayout, elements: int) -> None:
        device = layout.groups[0].partition.device
        self.staging = torch.empty(elements, dtype=layout.comm_dtype, device=device)
        self.sent: tuple[Any, Callable[[], None]] | None = None

    def finish(self) -> None:
        """Let the current stream wait for the collective, and take what it brought."""
        if self.sent is not None:
            work, take = self.sent
            work.wait()
            take()
            self.sent = None


class Flush:
    """One pass of reduce-scatters over a layout, in two staging buffers that take turns.

    A collective: every rank of the process group takes part, whichever of its parameters have
    gradients. What can fail on one rank alone, the allocation of buffers above all, fails in the
    constructor, before anything is sent. Beside the gradients and the new partition this takes the
    buffers, each of one chunk per rank and no larger than ``reduce_bucket_size``.

    Everything is queued on the stream that is current, which must be the same in the constructor
    and in `reduce`: a buffer is packed again only behind the collective that read it. The
    collectives themselves run beside that stream.
    """

    def __init__(self, layout: FlatLayout) -> None:
        """Allocate, and pack the first chunk: the gradients must be complete."""
        self.layout = layout
        longest = max(1, min(layout.bucket_elements // layout.ranks, _LONGEST_CHUNK))
        self._chunks = layout.chunks(longest)
        elements = layout.ranks * max(map(_length_of, self._chunks))
        self._lanes = [_Lane(layout, elements) for _ in range(2)]
        self._backend_scatters = True
        self._first = self._pack(self._chunks[0])

    def reduce(self) -> None:
        """Fill the partitions; they are complete behind the current stream."""
        self._send(self._first)
        for chunk in self._chunks[1:]:
            self._send(self._pack(chunk))
        for lane in self._lanes:
            lane.finish()

    @torch.no_grad()
    def _pack(self, chunk: Chunk) -> _Lane:
        """Copy the gradients of `chunk` of all partitions, divided.

        Waits, on the current stream, for the collective that last had the buffer.
        """
        self._lanes.reverse()
        lane = self._lanes[0]
        lane.finish()
        length = _length_of(chunk)
        staging = lane.staging[: self.layout.ranks * length]
        _fill(staging, self._segments(chunk))
        if self.layout.ranks > 1:
            staging.div_(self.layout.ranks)
        lane.chunk, lane.rows = chunk, staging.view(-1, length)
        return lane

    def _segments(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """Gradients in the order of a staging buffer, and where in it each begins."""
        layout, begin = self.layout, 0
        for owner in range(layout.ranks):
            for piece in chunk:
                group = layout.groups[piece.group]
                start = owner * group.partition.numel() + piece.start
                for param, source, at, length in group.slices(start, start + piece.length):
                    if (gradient := layout.gradient(param)) is not None:
                        layout.note_read(gradient)
                        yield begin + at, gradient.reshape(-1).narrow(0, source, length)
                begin += piece.length

    def _send(self, lane: _Lane) -> None:
        group, chunk, rows = self.layout.process_group, lane.chunk, lane.rows
        if self._backend_scatters:
            target = self._target(chunk)
            # torch 2.13 renamed it.
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            try:
                work = start(target, rows.view(-1), group=group, async_op=True)
                lane.sent = work, lambda: self._take(chunk, target)
                return
            except RuntimeError as error:
                # gloo learned it late. It says no on every rank, before anything is sent.
                if "support" not in str(error):
                    raise
                self._backend_scatters = False
        work = dist.all_reduce(rows, group=group, async_op=True)
        lane.sent = work, lambda: self._take(chunk, rows[self.layout.rank])

    def _target(self, chunk: Chunk) -> torch.Tensor:
        """Where a reduce-scatter writes: into the partition, if the chunk is one range of it."""
        partition = self.layout.groups[chunk[0].group].partition
        if len(chunk) == 1 and partition.dtype == self.layout.comm_dtype:
            return partition.narrow(0, chunk[0].start, chunk[0].length)
        length = _length_of(chunk)
        return torch.empty(length, dtype=self.layout.comm_dtype, device=partition.device)

    @torch.no_grad()
    def _take(self, chunk: Chunk, arrived: torch.Tensor) -> None:
        """Copy what was reduced into this rank's partitions, unless it arrived there."""
        at = 0
        for piece in chunk:
            partition = self.layout.groups[piece.group].partition
            target = partition.narrow(0, piece.start, piece.length)
            if target.data_ptr() != arrived.data_ptr():
                target.copy_(arrived.narrow(0, at, piece.length))
            at += piece.length


def _fill(target: torch.Tensor, segments: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Copy 1-D tensors to where they begin in `target`, in ascending order; zeros in the gaps.

    Neighbours are copied by one call: a call costs the host more than a layer's copy the device.
    """
    run: list[torch.Tensor] = []
    start = end = 0

    def copy_run() -> None:
        if run:
            torch.cat(run, out=target[start:end])

    for begin, source in segments:
        if begin != end:
            copy_run()
            target[end:begin].zero_()
            run, start = [], begin
        run.append(source)
        end = begin + source.numel()
    copy_run()
    target[end:].zero_()
