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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: with several chunks, one is packed while the one before is on the wire.
LONGEST_CHUNK = 1 << 24


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
    partition: torch.Tensor  # this rank's share, 1-D, as long as any other; zeros to begin with

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
    """One of two sets of buffers, and the collective that has it in use."""

    def __init__(self, layout: FlatLayout, staging: int, received: int) -> None:
        device = layout.groups[0].partition.device
        self.staging = torch.empty(staging, dtype=layout.comm_dtype, device=device)
        self.received = torch.empty(received, dtype=layout.comm_dtype, device=device)
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


class PartitionReduction:
    """Collectives over a layout, in two staging buffers that take turns.

    Everything is queued on the stream that is current during a call, which must be the same in
    all of them: a buffer is packed again only behind the collective that read it. The collectives
    themselves run beside that stream. Every rank has to make the same calls in the same order.
    """

    def __init__(self, layout: FlatLayout, longest: int, *, scatters: bool) -> None:
        """`longest`: elements of the longest chunk. `scatters`: for reduce_scatter(), not reduce().

        Allocates the buffers: each holds one chunk, or one chunk per rank if it scatters.
        """
        self._layout = layout
        staging, received = (longest * layout.ranks, longest) if scatters else (longest, 0)
        self._lanes = [_Lane(layout, staging, received) for _ in range(2)]
        self._backend_scatters = True

    def reduce_scatter(self, chunk: Chunk) -> None:
        """Start to reduce `chunk` of every rank's partition."""
        layout, length = self._layout, length_of(chunk)
        lane = self._free_lane()
        rows = lane.staging[: layout.ranks * length].view(layout.ranks, length)
        for owner in range(layout.ranks):
            self._pack(rows[owner], chunk, owner)
        lane.work, arrived = self._start_reduce_scatter(rows, lane.received[:length])
        lane.arriving = lambda: self._take(chunk, arrived)

    def reduce(self, chunk: Chunk, owner: int) -> None:
        """Start to reduce `chunk` of the partition that rank `owner` has."""
        layout = self._layout
        lane = self._free_lane()
        staging = lane.staging[: length_of(chunk)]
        self._pack(staging, chunk, owner)
        group = layout.process_group
        root = dist.get_global_rank(group, owner)
        lane.work = dist.reduce(staging, root, group=group, async_op=True)
        if owner == layout.rank:
            lane.arriving = lambda: self._take(chunk, staging)

    def finish(self) -> None:
        """Wait for what was started; the partitions are complete behind the current stream."""
        for lane in self._lanes:
            lane.settle()

    def _free_lane(self) -> _Lane:
        """The one whose collective began first, free again."""
        self._lanes.reverse()
        lane = self._lanes[0]
        lane.settle()
        return lane

    @torch.no_grad()
    def _pack(self, staging: torch.Tensor, chunk: Chunk, owner: int) -> None:
        """Copy the gradients of `chunk` of the partition that rank `owner` has, divided."""
        layout, filled, at = self._layout, 0, 0
        for piece in chunk:
            for part in layout.slices(piece, owner):
                begin = at + part.target
                staging[filled:begin].zero_()  # padding
                filled = begin + part.length
                target = staging[begin:filled]
                gradient = layout.gradient(part.param)
                if gradient is None:
                    target.zero_()
                    continue
                source = gradient.reshape(-1).narrow(0, part.source, part.length)
                torch.div(source, layout.divisor, out=target)
            at += piece.length
        staging[filled:].zero_()

    @torch.no_grad()
    def _take(self, chunk: Chunk, arrived: torch.Tensor) -> None:
        """Copy what was reduced into this rank's partitions."""
        at = 0
        for piece in chunk:
            partition = self._layout.groups[piece.group].partition
            partition.narrow(0, piece.start, piece.length).copy_(
                arrived.narrow(0, at, piece.length)
            )
            at += piece.length

    def _start_reduce_scatter(
        self, rows: torch.Tensor, received: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """The collective, and where this rank's row will be once it has ended."""
        group = self._layout.process_group
        if self._backend_scatters:
            # torch 2.13 renamed it.
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            try:
                return start(received, rows.view(-1), group=group, async_op=True), received
            except RuntimeError as error:
                # gloo learned it late. It says no on every rank, before anything is sent.
                if "support" not in str(error):
                    raise
                self._backend_scatters = False
        return dist.all_reduce(rows, group=group, async_op=True), rows[self._layout.rank]
