"""Stages 1 and 2: all ranks reduce buckets of the same parameters.

DeepSpeed fills its reduce buckets in the order in which gradients arrive. Where ranks use different
parameters, as experts to which only some batches are routed, a bucket would add gradients of
different parameters to one another. So in the first backward that reduces, the ranks agree on an
order. A rank whose gradients arrive in that order fills its buckets as without patches, at the cost
of one comparison per bucket. A rank whose bucket differs from the order empties it; from then on
each gradient is held until its turn in the order, and parameters that have no gradient by the end
of the backward are reduced as zeros.

A parameter is in the order once per gradient: several times with reentrant checkpointing of a layer
that runs twice. Later gradients add to the one in the bucket, which is complete when it has all
gradients that the order lists.

Parameters that no rank has used so far are not in the order. While there are any, one more
collective at the end of each backward checks whether a rank has used one.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import current_task_id, reaches
from ds_patches.steps.ranks import any_rank, same_on_all_ranks
from ds_patches.upstream.zero12_buckets import ReduceBuckets

#: Keys of parameters in the buckets, in the order of their reduction; one per gradient.
Order = list[Any]

_REMEDY = "put the backwards of a step into `with engine.coalesce_grad_reduction():`"
_REDUCED_ALREADY = (
    "a backward brought gradients to a parameter more often than in earlier backwards, in whose "
    "order the ranks reduce, and the parameter was already reduced. For one loss over more "
    f"forwards than before, {_REMEDY}, or raise reduce_bucket_size."
)
_CANNOT_BE_FORMED = (
    "gradients arrived in another order than on other ranks, and the reduce buckets cannot be "
    f"filled as there: {_REMEDY}"
)


class BucketOrder:
    """The order in which the ranks reduce the parameters of one optimizer."""

    def __init__(self, buckets: ReduceBuckets) -> None:
        self._buckets = buckets
        #: The common order of all ranks; None until a first backward has reduced.
        self._order: Order | None = None
        #: The order, split into buckets; None until a backward has filled all of them.
        self._known_buckets: list[Order] | None = None
        #: Keys of parameters that no rank has had a gradient of: they are not in the order.
        self._unused = {*buckets.parameters}
        #: Keys of the parameters that the first backward's graph reaches, if it was searched.
        self._reachable_in_first: set[Any] = set()
        #: True if only those arrived in the first backward, so that later graphs predict, too.
        self._first_was_predicted = False
        self.begin_backward()

    def begin_backward(self) -> None:
        """Reset the state of one backward."""
        self._task_id = current_task_id()
        self._has_ended = False
        #: The keys in each bucket that this backward has reduced.
        self._reduced: list[Order] = []
        #: True if the reduced buckets are the first ones of the order.
        self._buckets_cover_order = True
        #: True once gradients are held until their turn. The next five are used only then.
        self._follows_order = False
        #: The keys of the gradients that have arrived, in the order of arrival.
        self._arrived: Order = []
        #: The keys whose gradients have arrived and are in no bucket yet, as an ordered set.
        self.held: dict[Any, None] = {}
        #: The rest of the order, the next key last.
        self._remaining: Order = []
        #: Keys of the rest that the graph does not reach: they are reduced as zeros.
        self._unreachable: set[Any] = set()
        #: The keys in the buckets; None while DeepSpeed fills them as gradients arrive.
        self._bucket_keys: Order | None = None
        self._buckets.stop_diverting()

    def admits(self, keys: Order) -> bool:
        """Return True if the buckets, which hold `keys`, are to be reduced now.

        Else empty them, and hold their gradients until their turn in the order. Raises Refused if
        the buckets cannot be filled as on the other ranks.
        """
        known, index = self._known_buckets, len(self._reduced)
        if self._bucket_keys is not None:
            planned, in_buckets = self._bucket_keys, {*keys}
            keys = [key for key in planned if key in in_buckets]
            self._bucket_keys = [key for key in planned if key not in in_buckets]
            if known is not None and known[index:][:1] != [keys]:
                raise Refused(_CANNOT_BE_FORMED)
            fits = True
        elif self._order is None:
            if not self._reachable_in_first and current_task_id() == self._task_id:
                self._reachable_in_first = self._find_reachable()
            fits = not self._follows_order and self._same_on_all_ranks(keys)
        else:  # without the last bucket: a parameter that overflows it may be new to the order
            fits = not self._follows_order and (known or [])[index:-1][:1] == [keys]
        if fits:
            self._reduced.append(keys)
        else:
            self._follow_order()
        return fits

    def end_backward(self) -> None:
        """Fill the last bucket as on all ranks, after all gradients have arrived.

        Raises Refused if a parameter that was reduced got more gradients than the order lists.
        """
        if self._has_ended:  # DeepSpeed's own block runs the epilogue also without a backward
            return
        self._has_ended = True
        keys = self._buckets.contents()
        if self._follows_order:
            is_common = False
        elif self._order is None:
            is_common = self._same_on_all_ranks(keys, is_final=True)
        else:
            rest = self._known_buckets and self._known_buckets[len(self._reduced) :]
            is_common = rest == [keys]
        if not is_common:
            self._follow_order()
        if self._order is None:
            reduced = _flatten(self._reduced)
            arrived = self._arrived or [*reduced, *keys]
            self._first_was_predicted = not Counter(arrived) - Counter(self._reachable_in_first)
            order = arrived if is_common else merge_orders(self._all_gather(arrived))
            self._set_order(order)
            self._remaining = order[len(reduced) :][::-1]  # the order begins with the reduced ones
            self._buckets_cover_order = is_common or not reduced
        if is_common:
            self._bucket_keys = keys
        else:
            self._fill_bucket(reversed(self._remaining))
        if self._unused:
            self._add_newly_used()
        if self.held:
            raise Refused(_REDUCED_ALREADY)
        self._buckets.stop_diverting()
        if self._buckets_cover_order and self._known_buckets is None:
            self._known_buckets = [*self._reduced, self._bucket_keys or []]
            self._order = _flatten(self._known_buckets)

    # --- State of one backward --------------------------------------------------------------------

    def _find_reachable(self) -> set[Any]:
        """Return the parameters that the running backward reaches.

        Empty if DeepSpeed reduces only after all gradients have arrived.
        """
        if self._buckets.reduces_after_backward:
            return set()
        return {key for key, param in self._buckets.parameters.items() if reaches(param)}

    def _follow_order(self) -> None:
        """Hold gradients until their turn in the order, also those in the buckets."""
        if not self._follows_order:
            self._follows_order = True
            reduced = _flatten(self._reduced)
            self._remaining = (self._order or [])[len(reduced) :][::-1]
            self._arrived = [*reduced, *self._empty_buckets()]
            if self._first_was_predicted and current_task_id() == self._task_id:
                reached = self._find_reachable()
                if reached.issuperset(self._arrived):
                    self._unreachable = {*self._remaining} - reached
            self._buckets.divert(self._gradient_arrives)
        elif self._bucket_keys is None:
            self._arrived += self._empty_buckets()

    def _empty_buckets(self) -> Order:
        """Empty the buckets, and hold their gradients. Return their keys."""
        keys = self._buckets.empty()
        for key in keys:
            self._queue(key)
        return keys

    def _queue(self, key: Any) -> None:
        """Hold a gradient until its turn. Raises Refused if its turn is over."""
        if not (self._order is None or key in self._remaining or key in self._unused):
            raise Refused(_REDUCED_ALREADY)
        self._unreachable.discard(key)
        self.held[key] = None

    def _gradient_arrives(self, key: Any) -> bool:
        """Hold a gradient that arrives, fill buckets as far as possible, and return False."""
        self._follow_order()
        self._arrived.append(key)
        is_in_bucket = self._bucket_keys is not None and key in self._bucket_keys
        if is_in_bucket:  # autograd has added to that gradient, or replaced it
            self._buckets.refill()
        if not is_in_bucket or key in self._remaining:
            self._queue(key)
            while (rest := self._remaining) and (
                rest[-1] in self.held or rest[-1] in self._unreachable
            ):
                self._fill_bucket([rest.pop()])
        return False

    def _fill_bucket(self, keys: Iterable[Any]) -> None:
        self._bucket_keys = self._bucket_keys or []
        for key in keys:
            # A gradient of a parameter that was in it may have overflowed it at first.
            if self._known_buckets and self._bucket_keys == self._known_buckets[len(self._reduced)]:
                self._buckets.reduce(self._bucket_keys[0])
            if key not in self._bucket_keys:
                self._buckets.put(key)
            self._bucket_keys.append(key)
            self.held.pop(key, None)

    # --- Agreement of the ranks -------------------------------------------------------------------

    def _set_order(self, order: Order) -> None:
        self._order, self._unused = order, self._buckets.parameters.keys() - {*order}

    def _add_newly_used(self) -> None:
        """Reduce the parameters that some rank used for the first time. Collective."""
        is_new = not self._unused.isdisjoint(self._arrived)
        if not self._any_rank(is_new):
            return
        assert self._order is not None
        known = {*self._order}
        order = merge_orders([self._order, *self._all_gather(self._arrived if is_new else [])])
        self._known_buckets, self._buckets_cover_order = None, False
        self._fill_bucket(key for key in order if key not in known)
        self._set_order(order)

    def _any_rank(self, flag: bool) -> bool:
        """Return True if the flag is True on any rank. Collective."""
        return bool(any_rank([flag], self._buckets.group).item())

    def _same_on_all_ranks(self, keys: Order, is_final: bool = False) -> bool:
        """Return True if `keys` and `is_final` are the same on all ranks. Collective."""
        text = repr([keys, is_final]).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        return same_on_all_ranks(digest, self._buckets.group)

    def _all_gather(self, order: Order) -> list[Order]:
        orders: list[Any] = [None] * dist.get_world_size(self._buckets.group)
        dist.all_gather_object(orders, order, group=self._buckets.group)
        return orders


def _flatten(buckets: Iterable[Order]) -> Order:
    return [key for bucket in buckets for key in bucket]


def merge_orders(orders: Sequence[Order]) -> Order:
    """Merge orders into one that keeps each key behind its predecessors, where possible.

    Several occurrences of a key in one order are distinguished by their number.
    """
    first, *others = ([*_occurrences(order)] for order in orders)
    merged, seen = first, {*first}
    for order in others:
        index = 0
        for occurrence in order if not seen.issuperset(order) else ():
            if occurrence in seen:
                index = merged.index(occurrence) + 1
            else:
                merged.insert(index, occurrence)
                seen.add(occurrence)
                index += 1
    return [key for key, _ in merged]


def _occurrences(order: Order) -> Iterable[tuple[Any, int]]:
    counts: Counter[Any] = Counter()
    for key in order:
        yield key, counts[key]
        counts[key] += 1
