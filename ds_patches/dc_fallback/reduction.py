"""The reduction of full gradients into partitions, in buckets, behind the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: Elements. Enough for the wire to be the bound, and few enough to hold two of.
CAPACITY = 2**24
_IN_FLIGHT = 2

#: Takes this rank's part of the averaged gradient of a parameter: 1-D, padded with zeros.
Receive = Callable[[torch.nn.Parameter, torch.Tensor], None]


@dataclass
class _Bucket:
    """Gradients on their way. `out`: this rank's parts, one behind the other, each padded."""

    params: list[torch.nn.Parameter]
    widths: list[int]
    out: torch.Tensor
    sent: torch.Tensor  # its memory must stay until the wait
    work: Any


class Reduction:
    """Averages gradients over the ranks of `group_of(param)`; each rank keeps its part.

    The part of rank r is elements r * w to (r + 1) * w of the flat gradient, where w is the number
    of its elements over the number of ranks, rounded up: ZeRO-3's partitions.

    dtype_of: the dtype to send a gradient in.
    capacity: elements that are collected before they are sent; a larger gradient goes alone.
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
        self._waiting: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._in_flight: list[_Bucket] = []

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """Take in the full gradient of `param`."""
        if self._waiting and not self._fits(param, grad):
            self._send()
        self._waiting.append((param, grad))

    def finish(self) -> None:
        """Send what waits, and hand on all that was sent."""
        if self._waiting:
            self._send()
        while self._in_flight:
            self._arrive()

    def abandon(self) -> None:
        """Drop everything, as after an exception."""
        self._waiting.clear()
        for bucket in self._in_flight:
            bucket.work.wait()  # its memory is in use until then
        self._in_flight.clear()

    def _fits(self, param: torch.nn.Parameter, grad: torch.Tensor) -> bool:
        first, other = self._waiting[0]
        alike = self._group_of(first) is self._group_of(param) and other.dtype == grad.dtype
        held = sum(waiting.numel() for _, waiting in self._waiting)
        return alike and held + grad.numel() <= self._capacity

    @torch.no_grad()
    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        group = self._group_of(waiting[0][0])
        ranks = dist.get_world_size(group)
        widths = [-(-grad.numel() // ranks) for _, grad in waiting]
        first = waiting[0][1]
        dtype = self._dtype_of(first)
        rows = torch.empty(ranks, sum(widths), dtype=dtype, device=first.device)
        at = 0
        for (_, grad), width in zip(waiting, widths, strict=True):
            flat, padding = grad.reshape(-1), ranks * width - grad.numel()
            if padding:
                flat = torch.nn.functional.pad(flat, (0, padding))
            rows[:, at : at + width] = flat.view(ranks, width)
            at += width
        rows.div_(ranks)  # before the sum: half precision has little room above
        out = torch.empty(rows.shape[1], dtype=dtype, device=first.device)
        if len(self._in_flight) == _IN_FLIGHT:
            self._arrive()
        work = dist.reduce_scatter_tensor(out, rows.view(-1), group=group, async_op=True)
        params = [param for param, _ in waiting]
        self._in_flight.append(_Bucket(params, widths, out, rows, work))

    @torch.no_grad()
    def _arrive(self) -> None:
        bucket = self._in_flight.pop(0)
        bucket.work.wait()
        for param, part in zip(bucket.params, torch.split(bucket.out, bucket.widths), strict=True):
            self._receive(param, part)
