"""How an optimizer of stages 1 and 2 lays its parameters out flat, and where its step looks.

`layout` says it in plain PyTorch, for `flat_reduction`; `deliver` leaves the optimizer as
upstream's own epilogue does at a boundary. What differs by release: gradients that wait for the
boundary beside the averaged ones (0.17.6), padding between parameters (0.19.7), fp32 partitions of
a low precision model that own their memory in one piece (0.19.8).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import accelerator, keeps_order
from ds_patches.upstream.kinds import Kind, is_muon, kind_of


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


def covers(optimizer: Any) -> bool:
    """Whether reducing past upstream's own reducer is known to give the same gradients.

    The answer is the same on every rank, and for all of an optimizer's life.
    """
    return (
        kind_of(optimizer) is Kind.ZERO12
        and not optimizer.cpu_offload  # norms and overflow are noted on the way to the host
        and not optimizer.has_moe_layers  # experts reduce over other ranks
        and all(group is optimizer.dp_process_group for group in optimizer.real_dp_process_group)
        and optimizer.sequence_parallel_size == 1  # a divisor and a dtype of its own
        and optimizer.reduce_scatter  # off: an all-reduce is wanted, with its pre- and postscale
        and getattr(optimizer, "gradient_average", True)  # 0.19.6; off: sums
        and getattr(optimizer, "autoep_folding_tp_group", None) is None  # corrects each gradient
        and not is_muon(optimizer)  # steps inside the epilogue
        and len(_comm_dtypes(optimizer)) == 1  # torch.autocast gives parameters their own
        and _partitions_evenly(optimizer)
    )


def layout(optimizer: Any) -> FlatLayout:
    """What to reduce, on the current stream, into new partitions, of one that is covered.

    Frees upstream's bucket buffers, which backwards up to 0.18.2 allocate in a block too.
    """
    zero12.release_buffers(optimizer)
    (comm_dtype,) = _comm_dtypes(optimizer)
    return FlatLayout(
        groups=[
            FlatGroup(
                params=params,
                offsets=_offsets(optimizer, index),
                partition=torch.empty(
                    int(optimizer.partition_size[index]),
                    dtype=optimizer.gradient_accumulation_dtype,
                    device=optimizer.bit16_groups_flat[index].device,
                ),
            )
            for index, params in enumerate(optimizer.round_robin_bit16_groups)
        ],
        process_group=optimizer.dp_process_group,
        comm_dtype=comm_dtype,
        bucket_elements=int(optimizer.reduce_bucket_size),
        gradient=optimizer.get_param_gradient_attribute,
        note_read=_reader(),
    )


def deliver(optimizer: Any, layout: FlatLayout) -> None:
    """Put reduced partitions where ``step`` takes gradients from, and clear the parameters.

    What was reduced earlier in the same step is replaced.
    """
    for index, group in enumerate(layout.groups):
        optimizer.averaged_gradients[index] = _as_kept(optimizer, index, group, layout.rank)
        if hasattr(optimizer, "all_grad_tensors"):  # 0.17.6
            optimizer.all_grad_tensors[index] = None
    zero12.clear(optimizer)
    if hasattr(optimizer, "_epilogue_ran_this_backward"):  # 0.18.5
        optimizer._epilogue_ran_this_backward = True


def _reader() -> Callable[[torch.Tensor], None]:
    """Keeps the memory of a tensor until the now current stream, which reads it, has got there."""
    if keeps_order():
        return lambda tensor: None
    stream = accelerator().current_stream()
    return lambda tensor: tensor.record_stream(stream)


def _comm_dtypes(optimizer: Any) -> set[torch.dtype]:
    buckets = getattr(optimizer, "ipg_buckets", None)  # 0.17.2: one per dtype
    return {optimizer.communication_data_type} if buckets is None else set(buckets)


def _partitions_evenly(optimizer: Any) -> bool:
    ranks = dist.get_world_size(optimizer.dp_process_group)
    return all(
        int(size) * ranks == flat.numel()
        for size, flat in zip(optimizer.partition_size, optimizer.bit16_groups_flat, strict=True)
    )


def _offsets(optimizer: Any, index: int) -> list[int]:
    aligned = getattr(optimizer, "round_robin_bit16_offsets", None)  # 0.19.7
    if aligned is not None:
        return [int(offset) for offset in aligned[index]]
    sizes = (param.numel() for param in optimizer.round_robin_bit16_groups[index])
    return [0, *accumulate(sizes)][:-1]


def _as_kept(optimizer: Any, index: int, group: FlatGroup, rank: int) -> list[torch.Tensor]:
    """A partition as ``averaged_gradients`` holds it: a list of its views."""
    views = list(_views(optimizer, index, group, rank))
    if not zero12.sums_in_place(optimizer, index):
        return views
    from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

    kept: list[torch.Tensor] = GradPartitionBufferGroup(views, group.partition)
    return kept


def _views(optimizer: Any, index: int, group: FlatGroup, rank: int) -> Iterator[torch.Tensor]:
    """One view per parameter of the partition, in its shape if it is all there; and the padding."""
    size = group.partition.numel()
    offsets = {id(param): offset for param, offset in zip(group.params, group.offsets, strict=True)}
    end = 0
    for param in optimizer.params_in_partition[index]:
        offset = offsets[id(param)] - rank * size
        low, high = max(offset, 0), min(offset + param.numel(), size)
        if low > end:
            yield _padding(group.partition[end:low])
        view = group.partition[low:high]
        yield view.view(param.shape) if high - low == param.numel() else view
        end = high
    if end < size:
        yield _padding(group.partition[end:])


def _padding(view: torch.Tensor) -> torch.Tensor:
    view._zero_padding = True  # type: ignore[attr-defined]  # 0.19.7 leaves it out of the norm
    return view
