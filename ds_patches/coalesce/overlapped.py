"""Stages 1 and 2: the last backward of a window reduces buckets as they fill.

A backward goes from a model's last parameter to its first, so it fills one rank's partition after
the other. A bucket is therefore a range of one rank's partition, reduced to its owner while the
backward goes on. Of two ranks, though, one would only send and the other only receive, at half of
what the link carries: there a bucket is the same range of both partitions, and is reduce-scattered
as soon as both parts are filled, which the second half of the backward does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from .flat_reduction import Chunk, FlatLayout, PartitionReduction, length_of
from .upstream.streams import SideStream

#: Elements. Chunks of a rank's partition are no longer than this even where the bucket size would
#: allow it: a bucket has to be filled before it can be reduced beside the rest of the backward.
_LONGEST_CHUNK = 1 << 24


class _Bucket:
    """A chunk of the partition of one rank, or of each, and the parameters that it waits for."""

    def __init__(self, layout: FlatLayout, chunk: Chunk, owners: range) -> None:
        self.chunk = chunk
        self.owners = owners
        self.params = {
            id(part.param): part.param
            for owner in owners
            for piece in chunk
            for part in layout.slices(piece, owner)
        }
        self.missing = set(self.params)


class OverlappedReduction:
    """Buckets of a layout, sent in an order that is the same on all ranks.

    Ranks may differ in the order in which their gradients arrive and in which of them do; a bucket
    goes out when it is filled and all before it are gone, or in `finish`. Once a rank has sent
    anything, all ranks have to come to `finish` or `drain`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        positions: Mapping[int, int],
        drop: Callable[[torch.Tensor], None],
        side: SideStream,
        may_send: Callable[[], bool] = lambda: True,
        scatters: bool | None = None,
    ) -> None:
        """Allocate; sends nothing.

        `positions`: of parameters, by id, in the model; a backward comes to the highest first.
        `drop`: frees a parameter's gradient. `may_send`: asked before `ready` sends anything, until
        it says yes. `scatters`: reduce-scatter, or reduce to the owner; None chooses by the number
        of ranks.
        """
        self.layout = layout
        self._drop = drop
        self._side = side
        self._may_send = may_send
        self._scatters = layout.ranks == 2 if scatters is None else scatters
        share = layout.bucket_elements // layout.ranks if self._scatters else layout.bucket_elements
        chunks = layout.chunks(max(1, min(share, _LONGEST_CHUNK)), across_groups=False)
        # A bucket is filled when the parameter that comes first in the model has its gradient.
        buckets = sorted(
            (bucket for bucket in self._buckets(chunks) if bucket.params),
            key=lambda bucket: -min(positions.get(key, 0) for key in bucket.params),
        )
        self._waiting = deque(buckets)
        self._of_param: dict[int, list[_Bucket]] = {}
        for bucket in buckets:
            for key in bucket.params:
                self._of_param.setdefault(key, []).append(bucket)
        self._sent: set[int] = set()  # parameters of which some part was
        self._dropped: list[torch.Tensor] = []
        side.current_produced()  # the partitions, and the sums of the backwards before
        with side.entered():
            longest = max(map(length_of, chunks))
            self._reduction = PartitionReduction(layout, longest, scatters=self._scatters)

    def ready(self, param: torch.Tensor) -> None:
        """The sum of `param` is complete, on the current stream.

        Raises RuntimeError if part of it is on the wire already.
        """
        if id(param) in self._sent:
            raise _too_late(param)
        self._side.current_produced()
        for bucket in self._of_param.get(id(param), ()):
            bucket.missing.discard(id(param))
        while self._waiting and not self._waiting[0].missing and self._may_send():
            self._send(self._waiting.popleft())

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
        while self._waiting:
            self._send(self._waiting.popleft())
        with self._side.entered():
            self._reduction.finish()
        self._side.current_waits()

    def _buckets(self, chunks: list[Chunk]) -> Iterator[_Bucket]:
        everyone = range(self.layout.ranks)
        for chunk in chunks:
            if self._scatters:
                yield _Bucket(self.layout, chunk, everyone)
            else:
                yield from (
                    _Bucket(self.layout, chunk, everyone[rank : rank + 1]) for rank in everyone
                )

    def _send(self, bucket: _Bucket) -> None:
        with self._side.entered():
            self._reduction.send(self._reduction.pack(bucket.chunk, bucket.owners))
        for key, param in bucket.params.items():
            self._sent.add(key)
            self._of_param[key].remove(bucket)
            if not self._of_param[key]:
                self._drop(param)
                self._dropped.append(param)


def _too_late(param: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"a gradient of shape {tuple(param.shape)} arrived after its parameter was reduced: the "
        "backward announced as the window's last was not, or it reaches the parameter more than "
        "once, as reentrant checkpointing of a shared module does. Announce no last backward."
    )
