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
    #: The same, in a first backward with several buckets, which do not tell when each has come.
    NOTED = auto()
    #: Each waits for its turn in the order of the ranks.
    IN_ORDER = auto()


class BucketOrder:
    """The order in which the ranks of one optimizer reduce its parameters."""

    def __init__(self, buckets: ReduceBuckets) -> None:
        self._buckets = buckets
        self._order: Order | None = None  # None: no backward has reduced
        self._formed: list[Order] | None = None  # the buckets that it comes to, where known
        self._unused = buckets.params  # what is not in it
        self._foreseen: set[Any] = set()  # what the first backward was to reach
        self._foresees = False  # nothing else came in it
        self.begin_backward()

    def begin_backward(self) -> None:
        """Begin anew what is of one backward."""
        self._task = current_task_id()
        self._now: list[Order] = []  # the buckets of this backward
        self._forms_all = True  # ... are those of the whole order
        self._turn = Turn.AS_THEY_COME
        self._came: dict[Any, None] = {}  # in turn, where that is another than AS_THEY_COME
        self._due: Order = []  # IN_ORDER: what is to be reduced next, from its end
        self._absent: set[Any] = set()  # of that, what no gradient will come to
        self._is_own = False  # what is in the buckets was put there by us, in the order
        if self._order is None and not self._buckets.is_one:
            self._turn = Turn.NOTED
            self._buckets.divert(self._note)
        elif self._buckets.diversion:
            self._buckets.let_in()

    def reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Around the reduction of what is in the buckets, which may have to wait elsewhere."""
        only = self._buckets.only  # without a call for each bucket
        waiting = [*only.params] if only else self._buckets.waiting(*args, **kwargs)
        if not waiting:  # a parameter comes that is larger than a bucket
            return
        formed, at = self._formed, len(self._now)
        if formed is not None and at < len(formed) and formed[at] == waiting:
            fits = self._is_own or self._turn is not Turn.IN_ORDER
        else:
            if self._is_own and formed is not None:
                raise Refused(_CANNOT_BE_FORMED)
            fits = self._is_own or (self._order is None and self._is_the_same(waiting))
        if fits:
            self._now.append(waiting)
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
            rest = self._formed and self._formed[len(self._now) :]
            kept = rest == [waiting]
        if not kept:
            self._hold()
        if self._order is None:
            came = [*(self._came or (*_flat(self._now), *waiting))]
            self._foresees = self._foreseen.issuperset(came)
            if kept:
                self._set_order(came)
            else:
                self._agree(came)
        if not kept:
            self._put_in(reversed(self._due))
        if self._unused:
            self._look_for_new_ones()
        self._is_own = True  # the last bucket, which upstream reduces next
        if self._buckets.diversion:
            self._buckets.let_in()
        if self._forms_all and self._formed is None:
            self._formed = [*self._now, self._buckets.waiting()]

    def detach(self) -> None:
        """Leave the optimizer's buckets to it."""
        self._buckets.let_in()

    # --- Of one backward --------------------------------------------------------------------------

    def _is_the_same(self, waiting: Order) -> bool:
        """On all ranks, in a first backward."""
        if not self._foreseen and current_task_id() == self._task:
            self._foreseen = self._reached()
        return self._turn is not Turn.IN_ORDER and self._all_have([waiting])

    def _reached(self) -> set[Any]:
        """Inside a backward: what it brings gradients to, but for backwards within it.

        Nothing where all have come already.
        """
        if self._buckets.come_late:
            return set()
        return {key for key in self._buckets.params if reaches(self._buckets.param_of(key))}

    def _hold(self) -> None:
        """Let gradients wait for their turn, also those that are in the buckets."""
        if self._turn is not Turn.IN_ORDER:
            self._turn = Turn.IN_ORDER
            self._came = self._came or dict.fromkeys(_flat(self._now))
            self._due = [one for one in self._order or () if one not in self._came][::-1]
            self._came.update(dict.fromkeys(self._buckets.take_out()))
            if self._foresees and current_task_id() == self._task:
                reached = self._reached()
                if reached.issuperset(self._came):
                    self._absent = {*self._due} - reached
            self._buckets.divert(self._wait_for_its_turn)
        elif not self._is_own:
            self._came.update(dict.fromkeys(self._buckets.take_out()))

    def _note(self, param: Any) -> bool:
        self._came[param] = None
        return True

    def _wait_for_its_turn(self, param: Any) -> bool:
        """A gradient has come. One may have got into a bucket while that was taken back."""
        self._hold()
        is_put_in = param in self._came and param not in self._due and param not in self._unused
        if param in self._absent or is_put_in:
            raise Refused(_REDUCED)
        self._came[param] = None
        while self._due and (self._due[-1] in self._came or self._due[-1] in self._absent):
            self._put_in([self._due.pop()])
        return False

    def _put_in(self, params: Iterable[Any]) -> None:
        self._is_own = True
        for param in params:
            self._buckets.put_in(param)

    # --- With the other ranks ---------------------------------------------------------------------

    def _set_order(self, order: Order) -> None:
        self._order, self._unused = order, self._buckets.params - {*order}

    def _agree(self, came: Order) -> None:
        """After a first backward that was not the same on all ranks."""
        reduced = {*_flat(self._now)}
        order = merged(self._everyones(came))
        self._set_order(order)
        self._due = [one for one in order if one not in reduced][::-1]
        self._forms_all = not reduced

    def _look_for_new_ones(self) -> None:
        """Reduce what no rank had used before, if one has now, and put it into the order."""
        came = [*self._came]
        is_new = not self._unused.isdisjoint(came)
        if not self._any_rank(is_new):
            return
        assert self._order is not None
        before = {*self._order}
        order = merged([self._order, *self._everyones(came if is_new else [])])
        self._formed, self._forms_all = None, False
        self._put_in(one for one in order if one not in before)
        self._set_order(order)

    def _any_rank(self, says: bool) -> bool:
        """Whether one of the ranks says so, in one more collective among a backward's own."""
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
    """Return one order of all that is in any of them, each behind what it is behind in one."""
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
