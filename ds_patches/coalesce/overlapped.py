"""Stages 1 and 2: the last backward of a window reduces buckets as they fill.

A backward goes from a model's last parameter to its first, so it fills one rank's partition after
the other. A bucket is therefore a range of one rank's partition, reduced to its owner while the
backward goes on. Of two ranks, though, one would only send and the other only receive, at half of
what the link carries: there a bucket is the same range of both partitions, and is reduce-scattered
as soon as both parts are filled, which the second half of the backward does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from .flat_reduction import Chunk, FlatLayout, PartitionReduction, length_of
from .upstream.streams import SideStream

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: a bucket has to be filled before it can be reduced beside the rest of the backward.
_LONGEST_CHUNK = 1 << 25


class Bucket(NamedTuple):
    """A chunk of the partition of one rank, or of each, and the parameters that it waits for."""

    chunk: Chunk
    owners: range
    params: dict[int, torch.Tensor]  # by id


class BucketPlan:
    """All buckets of a layout, in the order in which they go out, which is the same on all ranks.

    Good for every layout of an optimizer: it holds none of the partitions.
    """

    def __init__(
        self, layout: FlatLayout, positions: Mapping[int, int], *, scatters: bool | None = None
    ) -> None:
        """`positions`: of parameters, by id, in the model; a backward comes to the highest first.
        `scatters`: reduce-scatter, or reduce to the owner; None chooses by the number of ranks.
        """
        self.scatters = layout.ranks == 2 if scatters is None else scatters
        share = layout.bucket_elements // layout.ranks if self.scatters else layout.bucket_elements
        chunks = layout.chunks(max(1, min(share, _LONGEST_CHUNK)), across_groups=False)
        self.longest = max(map(length_of, chunks))
        everyone = range(layout.ranks)
        owners = [everyone] if self.scatters else [everyone[r : r + 1] for r in everyone]
        buckets = [
            Bucket(chunk, some, _params_in(layout, chunk, some))
            for chunk in chunks
            for some in owners
        ]
        self.padding = [bucket for bucket in buckets if not bucket.params]
        # A bucket is filled when the parameter that comes first in the model has its gradient.
        self.buckets = sorted(
            (bucket for bucket in buckets if bucket.params),
            key=lambda bucket: -min(positions.get(key, 0) for key in bucket.params),
        )
        self.of_param: dict[int, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            for key in bucket.params:
                self.of_param.setdefault(key, []).append(index)


def _params_in(layout: FlatLayout, chunk: Chunk, owners: range) -> dict[int, torch.Tensor]:
    return {
        id(part.param): part.param
        for owner in owners
        for piece in chunk
        for part in layout.slices(piece, owner)
    }


class OverlappedReduction:
    """One backward's buckets.

    Ranks may differ in the order in which their gradients arrive and in which of them do; a bucket
    goes out when it is filled and all before it are gone, or in `finish`. Once a rank has sent
    anything, all ranks have to come to `finish` or `drain`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        plan: BucketPlan,
        *,
        drop: Callable[[torch.Tensor], None],
        side: SideStream,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        """Allocate; sends nothing.

        `drop`: frees a parameter's gradient. `may_send`: asked before `ready` sends anything.
        """
        self.layout = layout
        self._plan = plan
        self._drop = drop
        self._side = side
        self._may_send = may_send
        self._next = 0  # bucket
        self._missing = [set(bucket.params) for bucket in plan.buckets]
        self._unsent = {key: len(buckets) for key, buckets in plan.of_param.items()}
        self._sent: set[int] = set()  # parameters of which some part was
        self._dropped: list[torch.Tensor] = []
        side.current_produced()  # the partitions, and the sums of the backwards before
        with side.entered():
            self._reduction = PartitionReduction(layout, plan.longest, scatters=plan.scatters)
            for bucket in plan.padding:
                if layout.rank in bucket.owners:
                    layout.clear(bucket.chunk)

    def ready(self, param: torch.Tensor) -> None:
        """The sum of `param` is complete, on the current stream.

        Raises RuntimeError if part of it is on the wire already.
        """
        if id(param) in self._sent:
            raise _too_late(param)
        self._side.current_produced()
        for index in self._plan.of_param.get(id(param), ()):
            self._missing[index].discard(id(param))
        while self._waits_for_nothing() and self._may_send():
            self._send()

    def finish(self) -> None:
        """Reduce the rest; the partitions are complete behind the current stream.

        Raises RuntimeError if a gradient came after its parameter had been reduced.
        """
        self.drain()
        for param in self._dropped:
            if self.layout.gradient(param) is not None:
                raise _too_late(param)

    def drain(self) -> None:
        """Send what other ranks expect, whatever has become of it, and wait for all of it."""
        self._side.current_produced()
        while self._next < len(self._plan.buckets):
            self._send()
        with self._side.entered():
            self._reduction.finish()
        self._side.current_waits()

    def _waits_for_nothing(self) -> bool:
        return self._next < len(self._missing) and not self._missing[self._next]

    def _send(self) -> None:
        bucket = self._plan.buckets[self._next]
        self._next += 1
        with self._side.entered():
            self._reduction.send(self._reduction.pack(bucket.chunk, bucket.owners))
        for key, param in bucket.params.items():
            self._sent.add(key)
            self._unsent[key] -= 1
            if not self._unsent[key]:
                self._drop(param)
                self._dropped.append(param)


def _too_late(param: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"a gradient of shape {tuple(param.shape)} arrived after its parameter was reduced: the "
        "backward announced as the window's last was not, or it reaches the parameter more than "
        "once, as reentrant checkpointing of a shared module does. Announce no last backward."
    )
