"""The reduction of full gradients into ZeRO-3's partitions, in buckets, during the backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: Elements of a bucket. Large enough to be bound by bandwidth, small enough to hold two.
CAPACITY = 2**24
_MAX_IN_FLIGHT = 2

#: Receives this rank's part of a parameter's averaged gradient: 1-D, padded with zeros.
Receive = Callable[[torch.nn.Parameter, torch.Tensor], None]


@dataclass
class _Bucket:
    """Gradients in flight. `shard`: this rank's parts of `widths` elements, concatenated."""

    params: list[torch.nn.Parameter]
    widths: list[int]
    shard: torch.Tensor
    buffer: torch.Tensor  # keeps the memory until the wait
    work: Any


class Reduction:
    """Averages gradients over the ranks of `group_of(param)`; each rank keeps its part.

    The part of rank r is elements r * w to (r + 1) * w of the flat gradient, where w is the number
    of its elements over the number of ranks, rounded up: ZeRO-3's partitions.

    dtype_of: returns the dtype in which a gradient is reduced.
    receive: is called with each parameter and this rank's part of its gradient.
    capacity: elements that are collected before they are reduced; a larger gradient goes alone.
    """

    def __init__(
        self,
        group_of: Callable[[torch.nn.Parameter], Any],
        dtype_of: Callable[[torch.Tensor], torch.dtype],
        receive: Receive,
        capacity: int = CAPACITY,
    ) -> None:
        self._group_of, self._dtype_of, self._receive = group_of, dtype_of, receive
        self._capacity = capacity
        self._pending: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._in_flight: list[_Bucket] = []

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Add the full gradient of `param` to the bucket; a full bucket is reduced first."""
        if self._pending and not self._fits(param, grad):
            self._launch()
        self._pending.append((param, grad))

    def finish(self) -> None:
        """Reduce the gradients in the bucket, and wait for all reductions. Collective."""
        if self._pending:
            self._launch()
        while self._in_flight:
            self._deliver()

    def abandon(self) -> None:
        """Drop all gradients, for example after an exception, once in-flight reductions end."""
        self._pending.clear()
        for bucket in self._in_flight:
            bucket.work.wait()  # its memory is in use until then
        self._in_flight.clear()

    def _fits(self, param: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        first, other = self._pending[0]
        is_alike = self._group_of(first) is self._group_of(param) and other.dtype == grad.dtype
        numel = sum(pending.numel() for _, pending in self._pending)
        return is_alike and numel + grad.numel() <= self._capacity

    @torch.no_grad()
    def _launch(self) -> None:
        pending, self._pending = self._pending, []
        group = self._group_of(pending[0][0])
        ranks = dist.get_world_size(group)
        widths = [-(-grad.numel() // ranks) for _, grad in pending]
        first = pending[0][1]
        dtype = self._dtype_of(first)
        buffer = torch.empty(ranks, sum(widths), dtype=dtype, device=first.device)
        offset = 0
        for (_, grad), width in zip(pending, widths, strict=True):
            flat, padding = grad.reshape(-1), ranks * width - grad.numel()
            if padding:
                flat = torch.nn.functional.pad(flat, (0, padding))
            buffer[:, offset : offset + width] = flat.view(ranks, width)
            offset += width
        buffer.div_(ranks)  # before the sum, which may overflow in half precision
        shard = torch.empty(buffer.shape[1], dtype=dtype, device=first.device)
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._deliver()
        work = dist.reduce_scatter_tensor(shard, buffer.view(-1), group=group, async_op=True)
        params = [param for param, _ in pending]
        self._in_flight.append(_Bucket(params, widths, shard, buffer, work))

    @torch.no_grad()
    def _deliver(self) -> None:
        bucket = self._in_flight.pop(0)
        bucket.work.wait()
        for param, part in zip(
            bucket.params, torch.split(bucket.shard, bucket.widths), strict=True
        ):
            self._receive(param, part)
