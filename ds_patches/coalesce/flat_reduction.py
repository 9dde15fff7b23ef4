"""Gradients reduced straight into each rank's flat partition: plain PyTorch, no DeepSpeed.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one equal partition
per rank. A rank needs the reduced gradients of its own partition and of nothing else, so neither
collective here sends a result to a rank that drops it: ``reduce_scatter`` fills the same chunk of
every rank's partition, ``reduce`` a chunk of one rank's. Both put half of an all-reduce's bytes on
the wire.

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


class Slice(NamedTuple):
    """Part of one parameter, and where it lies in the range that was asked for; in elements."""

    param: torch.Tensor
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class FlatGroup:
    """Parameters laid end to end; gaps between them and after the last are padding."""

    params: Sequence[torch.Tensor]
    offsets: Sequence[int]  # where each begins, ascending, in elements
    partition: torch.Tensor  # this rank's share, 1-D, as long as any other; all of it is written

    def slices(self, start: int, end: int) -> Iterator[Slice]:
        """What lies in `start` to `end`, in flat order."""
        first = max(bisect_right(self.offsets, start) - 1, 0)
        for index in range(first, len(self.params)):
            param, offset = self.params[index], self.offsets[index]
            if offset >= end:
                return
            low, high = max(start, offset), min(end, offset + param.numel())
            if low < high:
                yield Slice(param, low - offset, low - start, high - low)


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
    divisor: float  # gradients are divided by it before they are summed
    bucket_elements: int  # what one staging buffer may hold
    gradient: Callable[[torch.Tensor], torch.Tensor | None]  # of a parameter; None counts as zeros
    reader: Callable[[], Callable[[torch.Tensor], None]]  # notes what the current stream reads

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    def slices(self, piece: Piece, owner: int) -> Iterator[Slice]:
        """What lies in `piece` of the partition that rank `owner` has."""
        group = self.groups[piece.group]
        start = owner * group.partition.numel() + piece.start
        return group.slices(start, start + piece.length)

    def clear(self, chunk: Chunk) -> None:
        """Zero `chunk` of this rank's partitions."""
        for piece in chunk:
            self.groups[piece.group].partition.narrow(0, piece.start, piece.length).zero_()

    def chunks(self, longest: int, *, across_groups: bool) -> list[Chunk]:
        """All partitions in chunks of up to `longest` elements.

        `across_groups`: fill a chunk up from the next group, so that many small groups do not
        become many small collectives.
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
                if not room or (start == size and not across_groups):
                    chunks.append(tuple(pieces))
                    pieces, room = [], longest
        if pieces:
            chunks.append(tuple(pieces))
        return chunks


def length_of(chunk: Chunk) -> int:
    """In elements, of one rank's share."""
    return sum(piece.length for piece in chunk)


class _Lane:
    """One of two staging buffers, and the collective that has it in use."""

    def __init__(self, layout: FlatLayout, elements: int) -> None:
        device = layout.groups[0].partition.device
        self.staging = torch.empty(elements, dtype=layout.comm_dtype, device=device)
        self.work: Any = None
        self.arriving: Callable[[], None] | None = None

    def settle(self) -> None:
        """Let the current stream wait for the collective, and take what it brought."""
        if self.work is None:
            return
        self.work.wait()
        if self.arriving is not None:
            self.arriving()
        self.work = self.arriving = None


class Packed(NamedTuple):
    """A chunk whose gradients are in a staging buffer, divided and ready to be sent."""

    chunk: Chunk
    owners: range
    lane: _Lane
    rows: torch.Tensor  # [owners, length of the chunk]


class PartitionReduction:
    """Collectives over a layout, in two staging buffers that take turns.

    Everything is queued on the stream that is current during a call, which must be the same in
    all of them: a buffer is packed again only behind the collective that read it. The collectives
    themselves run beside that stream. Every rank has to send the same chunks in the same order.
    """

    def __init__(self, layout: FlatLayout, longest: int, *, scatters: bool) -> None:
        """`longest`: elements of the longest chunk. `scatters`: chunks go out for all owners.

        Allocates the buffers: each holds one chunk, or one chunk per rank if it scatters.
        """
        self._layout = layout
        self._note_read = layout.reader()
        elements = longest * layout.ranks if scatters else longest
        self._lanes = [_Lane(layout, elements) for _ in range(2)]
        self._backend_scatters = True

    @torch.no_grad()
    def pack(self, chunk: Chunk, owners: range) -> Packed:
        """Copy the gradients of `chunk` of the partitions of `owners`, divided.

        Waits, on the current stream, for the collective that last had the buffer.
        """
        self._lanes.reverse()
        lane = self._lanes[0]
        lane.settle()
        length = length_of(chunk)
        staging = lane.staging[: len(owners) * length]
        _fill(staging, self._segments(chunk, owners))
        if self._layout.divisor != 1:
            staging.div_(self._layout.divisor)
        return Packed(chunk, owners, lane, staging.view(len(owners), length))

    def send(self, packed: Packed) -> None:
        """Start its reduction: a reduce-scatter to all owners, or a reduce to the only one."""
        if len(packed.owners) == self._layout.ranks:
            self._reduce_scatter(packed)
        else:
            self._reduce(packed)

    def finish(self) -> None:
        """Wait for what was sent; the partitions are complete behind the current stream."""
        for lane in self._lanes:
            lane.settle()

    def _segments(self, chunk: Chunk, owners: range) -> Iterator[tuple[int, torch.Tensor]]:
        """Gradients in the order of a staging buffer, and where in it each begins."""
        layout, begin = self._layout, 0
        for owner in owners:
            for piece in chunk:
                for part in layout.slices(piece, owner):
                    if (gradient := layout.gradient(part.param)) is not None:
                        self._note_read(gradient)
                        source = gradient.reshape(-1).narrow(0, part.source, part.length)
                        yield begin + part.target, source
                begin += piece.length

    def _reduce_scatter(self, packed: Packed) -> None:
        group = self._layout.process_group
        lane, rows = packed.lane, packed.rows
        if self._backend_scatters:
            target = self._target(packed.chunk)
            # torch 2.13 renamed it.
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            try:
                lane.work = start(target, rows.view(-1), group=group, async_op=True)
                lane.arriving = lambda: self._take(packed.chunk, target)
                return
            except RuntimeError as error:
                # gloo learned it late. It says no on every rank, before anything is sent.
                if "support" not in str(error):
                    raise
                self._backend_scatters = False
        lane.work = dist.all_reduce(rows, group=group, async_op=True)
        lane.arriving = lambda: self._take(packed.chunk, rows[self._layout.rank])

    def _reduce(self, packed: Packed) -> None:
        owner, group = packed.owners[0], self._layout.process_group
        root = dist.get_global_rank(group, owner)
        row = packed.rows[0]
        packed.lane.work = dist.reduce(row, root, group=group, async_op=True)
        if owner == self._layout.rank:
            packed.lane.arriving = lambda: self._take(packed.chunk, row)

    def _target(self, chunk: Chunk) -> torch.Tensor:
        """Where a reduce-scatter writes: into the partition, if the chunk is one range of it."""
        partition = self._layout.groups[chunk[0].group].partition
        if len(chunk) == 1 and partition.dtype == self._layout.comm_dtype:
            return partition.narrow(0, chunk[0].start, chunk[0].length)
        length = length_of(chunk)
        return torch.empty(length, dtype=self._layout.comm_dtype, device=partition.device)

    @torch.no_grad()
    def _take(self, chunk: Chunk, arrived: torch.Tensor) -> None:
        """Copy what was reduced into this rank's partitions, unless it arrived there."""
        at = 0
        for piece in chunk:
            partition = self._layout.groups[piece.group].partition
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
