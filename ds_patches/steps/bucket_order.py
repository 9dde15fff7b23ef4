"""Stages 1 and 2: what ranks reduce together is of the same parameters on all of them.

DeepSpeed fills its reduce buckets in the order in which gradients come. Where ranks differ in what
comes, as with experts that only some batches are routed to, a bucket would add gradients of
different parameters to one another. So the ranks agree on an order in the first backward that
reduces. A rank whose gradients come in that order forms the same buckets as ever. One that notices,
at a bucket, that its own is another takes it back; from there on each gradient waits for its
turn in the order, and what has none by the end of the backward is reduced as zero. Ranks that keep
to the order hear nothing of this, and pay one comparison for each bucket.

A parameter is in the order as often as gradients came to it: more than once with reentrant
checkpointing of a layer that runs twice. A gradient adds to one that is in the bucket, which is
full when all have come that the order has in it.

What no rank has used so far is in no bucket. Only while there is such a parameter, one more
collective at the end of a backward says whether a rank has used one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import current_task_id, reaches
from ds_patches.steps.ranks import on_any
from ds_patches.upstream.zero12_buckets import ReduceBuckets

#: Parameters in turn, each by its key in the buckets; more than once if it is reduced again.
Order = list[Any]

_INSTEAD = "put the backwards of a step into `with engine.coalesce_grad_reduction():`"
_REDUCED = (
    "a backward brought a gradient to a parameter that has already been reduced in it, and more "
    "often than in earlier backwards, whose order the ranks keep to when they reduce. For one "
    f"loss over more forwards than before, {_INSTEAD}, or raise reduce_bucket_size."
)
_CANNOT_BE_FORMED = (
    "gradients came in another order than on other ranks, and cannot be reduced in theirs: "
    f"{_INSTEAD}"
)


class BucketOrder:
    """The order in which the ranks of one optimizer reduce its parameters."""

    def __init__(self, buckets: ReduceBuckets) -> None:
        self._buckets = buckets
        #: What ranks reduce, in turn; None until a first backward has reduced.
        self._order: Order | None = None
        #: The order, bucket by bucket; None until a backward has filled them all.
        self._known_buckets: list[Order] | None = None
        #: Parameters that no rank has had a gradient of: the order leaves them out.
        self._unused = {*buckets.parameters}
        #: What the graph of the first backward led to, each once, where we looked.
        self._reachable_in_first: set[Any] = set()
        #: Whether nothing else came in it: then a graph tells what will not come.
        self._first_was_predicted = False
        self.begin_backward()

    def begin_backward(self) -> None:
        """Reset what is known of one backward."""
        self._task = current_task_id()
        self._has_ended = False
        #: What came into each of the buckets that were reduced.
        self._reduced: list[Order] = []
        #: Whether they are the order's, from its begin.
        self._buckets_cover_order = True
        #: Whether gradients wait for their turn in the order of the ranks, from one of them on.
        self._in_order = False
        #: In order: what came, in turn.
        self._came: Order = []
        #: In order: the parameters whose gradients are in no bucket yet.
        self.held: dict[Any, None] = {}
        #: In order: what is to be reduced, the next one last.
        self._due: Order = []
        #: In order: what the graph does not lead to; it is reduced as zeros.
        self._will_not_come: set[Any] = set()
        #: What the buckets hold of the order; None while they are filled as gradients come.
        self._filled: Order | None = None
        if self._buckets.diversion:
            self._buckets.stop_diverting()

    def admits(self, keys: Order) -> bool:
        """Return True if the buckets, into which `keys` came, are to be reduced now.

        Else their gradients are given back, to wait for their turn.
        """
        formed, index = self._known_buckets, len(self._reduced)
        if self._filled is not None:
            keys, self._filled = _parted(self._filled, {*keys})
            if formed is not None and formed[index:][:1] != [keys]:
                raise Refused(_CANNOT_BE_FORMED)
            fits = True
        elif formed is None:
            fits = self._order is None and self._is_the_same(keys)
        else:  # what overflows the last one may be new to the order
            is_last = index + 1 == len(formed)
            fits = not self._in_order and not is_last and formed[index] == keys
        if fits:
            self._reduced.append(keys)
        else:
            self._hold()
        return fits

    def end_backward(self) -> None:
        """All gradients have come: leave those in the buckets that all ranks have there."""
        if self._has_ended:  # DeepSpeed's own block runs the epilogue also without a backward
            return
        self._has_ended = True
        keys = self._buckets.contents()
        if self._in_order:
            kept = False
        elif self._order is None:
            kept = self._all_have(keys, last=True)
        else:
            rest = self._known_buckets and self._known_buckets[len(self._reduced) :]
            kept = rest == [keys]
        if not kept:
            self._hold()
        if self._order is None:
            came = self._came or [*_flat(self._reduced), *keys]
            self._first_was_predicted = not Counter(came) - Counter(self._reachable_in_first)
            if kept:
                self._set_order(came)
            else:
                self._agree(came)
        if kept:
            self._filled = keys
        else:
            self._put_in(reversed(self._due))
        if self._unused:
            self._look_for_new_ones()
        if self.held:
            raise Refused(_REDUCED)
        if self._buckets.diversion:
            self._buckets.stop_diverting()
        if self._buckets_cover_order and self._known_buckets is None:
            self._known_buckets = [*self._reduced, self._filled or []]
            self._order = _flat(self._known_buckets)

    def detach(self) -> None:
        """Leave the optimizer's buckets to it."""
        self._buckets.stop_diverting()

    # --- Of one backward --------------------------------------------------------------------------

    def _is_the_same(self, keys: Order) -> bool:
        """Return whether all ranks have this in their buckets. A collective of a first backward."""
        if not self._reachable_in_first and current_task_id() == self._task:
            self._reachable_in_first = self._reached()
        return not self._in_order and self._all_have(keys)

    def _reached(self) -> set[Any]:
        """Return the parameters that the running backward leads to; none if all have come already.

        Backwards inside it lead to others.
        """
        if self._buckets.reduces_after_backward:
            return set()
        return {key for key, param in self._buckets.parameters.items() if reaches(param)}

    def _hold(self) -> None:
        """Let gradients wait for their turn, also those that are in the buckets."""
        if not self._in_order:
            self._in_order = True
            reduced = _flat(self._reduced)
            self._due = (self._order or [])[len(reduced) :][::-1]
            self._came = [*reduced, *self._take_out()]
            if self._first_was_predicted and current_task_id() == self._task:
                reached = self._reached()
                if reached.issuperset(self._came):
                    self._will_not_come = {*self._due} - reached
            self._buckets.divert(self._wait_for_its_turn)
        elif self._filled is None:
            self._came += self._take_out()

    def _take_out(self) -> Order:
        """Empty the buckets: what came into them waits for its turn."""
        keys = self._buckets.empty()
        for key in keys:
            self._let_wait(key)
        return keys

    def _let_wait(self, key: Any) -> None:
        """Let a gradient wait for its turn. Raises Refused if that is over."""
        if not (self._order is None or key in self._due or key in self._unused):
            raise Refused(_REDUCED)
        self._will_not_come.discard(key)
        self.held[key] = None

    def _wait_for_its_turn(self, key: Any) -> bool:
        """A gradient has come. One may have got into a bucket while that was taken back."""
        self._hold()
        self._came.append(key)
        is_in_bucket = self._filled is not None and key in self._filled
        if is_in_bucket:  # it adds to that, or replaces it
            self._buckets.refill()
        if not is_in_bucket or key in self._due:
            self._let_wait(key)
            while self._due and self._is_ready(self._due[-1]):
                self._put_in([self._due.pop()])
        return False

    def _is_ready(self, key: Any) -> bool:
        return key in self.held or key in self._will_not_come

    def _put_in(self, keys: Iterable[Any]) -> None:
        self._filled = self._filled or []
        for key in keys:
            # As it was formed, a gradient that came again may have overflowed it.
            if self._known_buckets and self._filled == self._known_buckets[len(self._reduced)]:
                self._buckets.reduce(self._filled[0])
            if key not in self._filled:
                self._buckets.put(key)
            self._filled.append(key)
            self.held.pop(key, None)

    # --- With the other ranks ---------------------------------------------------------------------

    def _set_order(self, order: Order) -> None:
        self._order, self._unused = order, self._buckets.parameters.keys() - {*order}

    def _agree(self, came: Order) -> None:
        """Make one order of what came on each rank, after a first backward in which they differ."""
        reduced = _flat(self._reduced)
        order = merged(self._everyones(came))
        self._set_order(order)
        self._due = order[len(reduced) :][::-1]  # it begins with them
        self._buckets_cover_order = not reduced

    def _look_for_new_ones(self) -> None:
        """Reduce what no rank had used before, if one has now, and put it into the order."""
        is_new = not self._unused.isdisjoint(self._came)
        if not self._any_rank(is_new):
            return
        assert self._order is not None
        before = {*self._order}
        order = merged([self._order, *self._everyones(self._came if is_new else [])])
        self._known_buckets, self._buckets_cover_order = None, False
        self._put_in(key for key in order if key not in before)
        self._set_order(order)

    def _any_rank(self, says: bool) -> bool:
        """Return whether any rank says so. A collective among the backward's own."""
        return bool(on_any([says], self._buckets.group).item())

    def _all_have(self, keys: Order, last: bool = False) -> bool:
        text = repr([keys, last]).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        both = torch.tensor([digest, -digest], device=self._buckets.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._buckets.group)
        most, least = both.tolist()
        return bool(most == -least)

    def _everyones(self, mine: Order) -> list[Order]:
        orders: list[Any] = [None] * dist.get_world_size(self._buckets.group)
        dist.all_gather_object(orders, mine, group=self._buckets.group)
        return orders


def _flat(buckets: Iterable[Order]) -> Order:
    return [key for bucket in buckets for key in bucket]


def _parted(order: Order, keys: set[Any]) -> tuple[Order, Order]:
    """Return what of an order is of these keys, and what is not."""
    return [key for key in order if key in keys], [key for key in order if key not in keys]


def merged(orders: Sequence[Order]) -> Order:
    """Merge orders: what precedes a parameter in an order that has it precedes it still.

    What comes to a parameter again is told apart by how often it has come before.
    """
    first, *others = ([*_counted(order)] for order in orders)
    merged, known = first, {*first}
    for order in others:
        index = 0
        for place in order if not known.issuperset(order) else ():
            if place in known:
                index = merged.index(place) + 1
            else:
                merged.insert(index, place)
                known.add(place)
                index += 1
    return [key for key, _ in merged]


def _counted(order: Order) -> Iterable[tuple[Any, int]]:
    times: Counter[Any] = Counter()
    for key in order:
        yield key, times[key]
        times[key] += 1
