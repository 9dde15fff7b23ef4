"""Stages 1 and 2: a gradient that comes to a parameter again in one backward counts again.

DeepSpeed expects one gradient for each parameter in a backward. Reentrant checkpointing of a layer
that runs twice brings two. Autograd adds the second to ``grad``, and that is either in a reduce
bucket, which then has the parameter twice, or has been reduced, and the sum would be of a reduced
and an unreduced gradient. So the rule here is: ``grad`` is what has come and is not reduced. A
bucket that differs from it is filled anew. What a bucket has reduced leaves the parameter, is added
to what was reduced of it before in this backward, and comes back when the epilogue collects the
gradients. Nothing is copied unless a gradient comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import layered
from ds_patches.steps.bucket_order import BucketOrder
from ds_patches.steps.sums import GradientSum, divide
from ds_patches.upstream import zero12
from ds_patches.upstream.zero12_buckets import ReduceBuckets


class ReducedGradients:
    """What one optimizer has reduced in the running backward, and holds outside its buckets."""

    def __init__(self, buckets: ReduceBuckets, order: BucketOrder | None, sum: GradientSum) -> None:
        """order: that of the ranks. sum: what tells by how much gradients are to be divided."""
        self._buckets, self._order, self._sum = buckets, order, sum
        #: Whether the epilogue reduces, which then collects the gradients.
        self.is_last = False
        #: This rank's reduced gradients, each of its parameter's shape, by the bucket's key.
        self._kept: dict[Any, torch.Tensor] = {}
        #: Gradients that the reduction stream still reads: alive until the next reduction.
        self._being_read: list[torch.Tensor] = []
        #: What takes the place of a reduced gradient that may come into the same memory once more.
        self._zeros: dict[Any, torch.Tensor] = {}
        #: Whether a bucket was reduced in this backward.
        self.any = False

    def forget(self) -> None:
        """Drop them, as a backward begins or has raised."""
        self._kept.clear()
        self._being_read = []
        self.any = False

    def reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed reduces what is in the buckets, at once or when it is due among the ranks."""
        buckets, only = self._buckets, self._buckets.single
        is_last, self.is_last = self.is_last, False  # others may come inside it
        keys = [*only.params] if only else buckets.contents(*args, **kwargs)
        # None: a parameter comes that is larger than a bucket.
        if keys and (self._order is None or self._order.admits(keys)):
            self.any = True
            gradients = [*only.grads] if only else buckets.gradients(*args, **kwargs)
            # DeepSpeed puts a gradient that comes again in again. If the bucket overflows, it is
            # reduced, and the gradient, which it held, still goes first into the empty bucket.
            differs = len({*keys}) < len(keys)
            firsts = keys if not buckets.is_single else keys[:1]
            for key, gradient in zip(firsts, gradients, strict=False):  # without a call
                held = getattr(buckets.parameters[key], buckets.attribute)
                differs |= buckets.keeps_gradients and held is not gradient
            if differs:
                buckets.refill()
                keys = buckets.contents(*args, **kwargs)
                gradients = buckets.gradients(*args, **kwargs)
            if self._sum.divisor > 1 or not self._kept.keys().isdisjoint(keys):
                self._add(wrapped, args, kwargs, keys, gradients)
            else:
                wrapped(*args, **kwargs)
                if buckets.keeps_gradients:
                    self._being_read = self._take(keys, gradients)
        if is_last:
            self.restore()

    def _add(
        self,
        run: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        keys: list[Any],
        gradients: list[torch.Tensor],
    ) -> None:
        """Reduce the buckets by `run`, and add what was reduced before, or divide."""
        buckets, divisor = self._buckets, self._sum.divisor
        if divisor > 1 and buckets.knows_producers:
            with buckets.reduction_stream(behind_producers=True):
                divide(buckets.tensors(*args, **kwargs), divisor)
            divisor = 1
        with layered(buckets.optimizer, copy_grads_in_partition=self._copy):
            run(*args, **kwargs)
        if buckets.keeps_gradients:
            with buckets.reduction_stream(), torch.no_grad():
                self._being_read = self._take(keys, gradients, divisor)

    def _copy(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed copies a reduced gradient to the partition's memory, which has one place."""
        param = args[0] if args else kwargs["param"]
        if self._buckets.key_of(param) not in self._kept:
            wrapped(*args, **kwargs)

    def _take(
        self, keys: list[Any], gradients: list[torch.Tensor], divisor: int = 1
    ) -> list[torch.Tensor]:
        """Take the reduced gradients from their parameters; return those that are not kept.

        Undo DeepSpeed's notes that the parameters have been reduced, and are to be cleared.
        """
        buckets, kept, others = self._buckets, self._kept, []
        marks, numbers = buckets.optimizer.params_already_reduced, buckets.param_ids
        for key, gradient in zip(keys, gradients, strict=True):
            setattr(buckets.parameters[key], buckets.attribute, None)
            marks[numbers[key]] = False
            reduced = gradient.data  # another object: DeepSpeed may give this one other memory
            if divisor > 1:
                divide([reduced], divisor)
            if key in buckets.stays_on_parameter and key not in kept:
                kept[key] = reduced
                continue
            if key in kept:
                kept[key].add_(reduced)
            else:
                others.append(reduced)
            if buckets.reuses_buffer:
                if key not in self._zeros:
                    self._zeros[key] = gradient.new_zeros(()).expand_as(gradient)
                gradient.data = self._zeros[key]
        if buckets.defers_clearing:
            zero12.clear_previous_gradients(buckets.optimizer)
        return others

    def restore(self) -> None:
        """Give the parameters the sums of this backward, which the epilogue collects."""
        attribute, parameters = self._buckets.attribute, self._buckets.parameters
        for key, gradient in self._kept.items():
            setattr(parameters[key], attribute, gradient)
        self._kept.clear()
