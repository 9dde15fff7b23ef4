"""Stages 1 and 2: what ranks reduce together is of the same parameters on all of them.

DeepSpeed fills its reduce buckets in the order in which gradients come. Where ranks differ in what
comes, as with experts that only some batches are routed to, a bucket would add gradients of
different parameters to one another. So the ranks agree on an order in the first backward that
reduces. A rank whose gradients come in that order forms the same buckets as ever. One that notices,
at a bucket, that its own is another takes it back; from there on each gradient waits for its
turn in the order, and what has none by the end of the backward is reduced as zero. Ranks that keep
to the order hear nothing of this, and pay one comparison for each bucket.

What no rank has used so far is in no bucket. Only while there is such a parameter, one more
collective at the end of a backward says whether a rank has used one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import current_task_id, reaches
from ds_patches.steps.ranks import on_any
from ds_patches.upstream.zero12_buckets import ReduceBuckets

#: Parameters, each by what DeepSpeed keeps of it in a bucket.
Order = list[Any]

_REDUCED = (
    "a gradient came to a parameter that has already been reduced in this backward: put the "
    "backwards of a step into `with engine.coalesce_grad_reduction():`"
)
_CANNOT_BE_FORMED = (
    "gradients came in another order than on other ranks, and cannot be reduced in theirs: put the "
    "backwards of a step into `with engine.coalesce_grad_reduction():`"
)


class Turn(Enum):
    """How the gradients of a backward go into the buckets."""

    #: As they come, as on stock.
    AS_THEY_COME = auto()
    #: The same, and noted: between several buckets, as a first backward may have, no order is kept.
    NOTED = auto()
    #: Each waits for its turn in the order of the ranks.
    IN_ORDER = auto()


class BucketOrder:
    """The order in which the ranks of one optimizer reduce its parameters."""

    def __init__(self, buckets: ReduceBuckets) -> None:
        self._buckets = buckets
        #: What ranks reduce, in turn; None until a first backward has reduced.
        self._order: Order | None = None
        #: The buckets that the order fills; None until a backward has filled them all.
        self._known_buckets: list[Order] | None = None
        #: Parameters that no rank has had a gradient of: the order leaves them out.
        self._unused = buckets.params
        #: What the graph of the first backward led to, where we looked.
        self._reachable_in_first: set[Any] = set()
        #: Whether nothing else came in it: then a graph tells what will not come.
        self._first_was_predicted = False
        self.begin_backward()

    def begin_backward(self) -> None:
        """Reset what is known of one backward."""
        self._task = current_task_id()
        #: The buckets that were reduced, each what was in it.
        self._reduced: list[Order] = []
        #: Whether they are the order's, from its begin.
        self._buckets_cover_order = True
        self._turn = Turn.AS_THEY_COME
        #: The gradients that came, in turn; not kept AS_THEY_COME.
        self._came: dict[Any, None] = {}
        #: IN_ORDER: what is to be reduced, the next one last.
        self._due: Order = []
        #: IN_ORDER: what the graph does not lead to; it is reduced as zeros.
        self._will_not_come: set[Any] = set()
        #: Whether what is in the buckets was put there in the order.
        self._filled_by_us = False
        if self._order is None and not self._buckets.is_one:
            self._turn = Turn.NOTED
            self._buckets.divert(self._note)
        elif self._buckets.diversion:
            self._buckets.let_in()

    def reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed reduces what is in the buckets; here that may have to wait for its turn."""
        only = self._buckets.only  # without a call for each bucket
        waiting = [*only.params] if only else self._buckets.waiting(*args, **kwargs)
        if not waiting:  # a parameter comes that is larger than a bucket
            return
        formed, at = self._known_buckets, len(self._reduced)
        if formed is not None and at < len(formed) and formed[at] == waiting:
            fits = self._filled_by_us or self._turn is not Turn.IN_ORDER
        else:
            if self._filled_by_us and formed is not None:
                raise Refused(_CANNOT_BE_FORMED)
            fits = self._filled_by_us or (self._order is None and self._is_the_same(waiting))
        if fits:
            self._reduced.append(waiting)
            wrapped(*args, **kwargs)
        else:
            self._hold()

    def end_backward(self) -> None:
        """All gradients have come: leave those in the buckets that all ranks have there."""
        waiting = self._buckets.waiting()
        if self._turn is Turn.IN_ORDER:
            kept = False
        elif self._order is None:
            kept = self._all_have([waiting, [*self._came]])
        else:
            rest = self._known_buckets and self._known_buckets[len(self._reduced) :]
            kept = rest == [waiting]
        if not kept:
            self._hold()
        if self._order is None:
            came = [*(self._came or (*_flat(self._reduced), *waiting))]
            self._first_was_predicted = self._reachable_in_first.issuperset(came)
            if kept:
                self._set_order(came)
            else:
                self._agree(came)
        if not kept:
            self._put_in(reversed(self._due))
        if self._unused:
            self._look_for_new_ones()
        self._filled_by_us = True  # the last bucket, which upstream reduces next
        if self._buckets.diversion:
            self._buckets.let_in()
        if self._buckets_cover_order and self._known_buckets is None:
            self._known_buckets = [*self._reduced, self._buckets.waiting()]

    def detach(self) -> None:
        """Leave the optimizer's buckets to it."""
        self._buckets.let_in()

    # --- Of one backward --------------------------------------------------------------------------

    def _is_the_same(self, waiting: Order) -> bool:
        """Return whether all ranks have this in their buckets. A collective of a first backward."""
        if not self._reachable_in_first and current_task_id() == self._task:
            self._reachable_in_first = self._reached()
        return self._turn is not Turn.IN_ORDER and self._all_have([waiting])

    def _reached(self) -> set[Any]:
        """Return the parameters that the running backward leads to; none if all have come already.

        Backwards inside it lead to others.
        """
        if self._buckets.come_late:
            return set()
        return {key for key in self._buckets.params if reaches(self._buckets.param_of(key))}

    def _hold(self) -> None:
        """Let gradients wait for their turn, also those that are in the buckets."""
        if self._turn is not Turn.IN_ORDER:
            self._turn = Turn.IN_ORDER
            self._came = self._came or dict.fromkeys(_flat(self._reduced))
            self._due = [one for one in self._order or () if one not in self._came][::-1]
            self._came.update(dict.fromkeys(self._buckets.take_out()))
            if self._first_was_predicted and current_task_id() == self._task:
                reached = self._reached()
                if reached.issuperset(self._came):
                    self._will_not_come = {*self._due} - reached
            self._buckets.divert(self._wait_for_its_turn)
        elif not self._filled_by_us:
            self._came.update(dict.fromkeys(self._buckets.take_out()))

    def _note(self, param: Any) -> bool:
        self._came[param] = None
        return True

    def _wait_for_its_turn(self, param: Any) -> bool:
        """A gradient has come. One may have got into a bucket while that was taken back."""
        self._hold()
        is_put_in = param in self._came and param not in self._due and param not in self._unused
        if param in self._will_not_come or is_put_in:
            raise Refused(_REDUCED)
        self._came[param] = None
        while self._due and (self._due[-1] in self._came or self._due[-1] in self._will_not_come):
            self._put_in([self._due.pop()])
        return False

    def _put_in(self, params: Iterable[Any]) -> None:
        self._filled_by_us = True
        for param in params:
            self._buckets.put_in(param)

    # --- With the other ranks ---------------------------------------------------------------------

    def _set_order(self, order: Order) -> None:
        self._order, self._unused = order, self._buckets.params - {*order}

    def _agree(self, came: Order) -> None:
        """Make one order of what came on each rank, after a first backward in which they differ."""
        reduced = {*_flat(self._reduced)}
        order = merged(self._everyones(came))
        self._set_order(order)
        self._due = [one for one in order if one not in reduced][::-1]
        self._buckets_cover_order = not reduced

    def _look_for_new_ones(self) -> None:
        """Reduce what no rank had used before, if one has now, and put it into the order."""
        came = [*self._came]
        is_new = not self._unused.isdisjoint(came)
        if not self._any_rank(is_new):
            return
        assert self._order is not None
        before = {*self._order}
        order = merged([self._order, *self._everyones(came if is_new else [])])
        self._known_buckets, self._buckets_cover_order = None, False
        self._put_in(one for one in order if one not in before)
        self._set_order(order)

    def _any_rank(self, says: bool) -> bool:
        """Return whether any rank says so. A collective among the backward's own."""
        return bool(on_any([says], self._buckets.group).item())

    def _all_have(self, orders: list[Order]) -> bool:
        text = repr(orders).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        both = torch.tensor([digest, -digest], device=self._buckets.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._buckets.group)
        most, least = both.tolist()
        return bool(most == -least)

    def _everyones(self, mine: Order) -> list[Order]:
        found: list[Any] = [None] * dist.get_world_size(self._buckets.group)
        dist.all_gather_object(found, mine, group=self._buckets.group)
        return found


def _flat(buckets: Iterable[Order]) -> Order:
    return [one for bucket in buckets for one in bucket]


def merged(orders: Sequence[Order]) -> Order:
    """Merge orders: what precedes a parameter in an order that has it precedes it still."""
    found, known = [*orders[0]], {*orders[0]}
    for order in orders[1:]:
        at = 0
        for one in order if not known.issuperset(order) else ():
            if one in known:
                at = found.index(one) + 1
            else:
                found.insert(at, one)
                known.add(one)
                at += 1
    return found
