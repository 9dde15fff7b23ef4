"""Stages 1 and 2: several gradients of one parameter in one backward all count.

DeepSpeed expects one gradient per parameter and backward. Reentrant checkpointing of a layer that
runs twice brings two. Autograd adds the second to ``grad``. If the first is still in a reduce
bucket, the bucket then lists the parameter twice. If it was reduced, ``grad`` is the sum of a
reduced and an unreduced gradient. So here ``grad`` holds only unreduced gradients: a bucket that
differs from it is filled again, and a reduced gradient is removed from its parameter, added to
those that were reduced before in this backward, and restored when the epilogue collects the
gradients. Nothing is copied unless a parameter gets another gradient.
"""

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
    """The gradients that one optimizer has reduced in the running backward."""

    def __init__(self, buckets: ReduceBuckets, order: BucketOrder | None, sum: GradientSum) -> None:
        """order: the ranks' common order, or None. sum: its divisor divides the gradients."""
        self._buckets, self._order, self._sum = buckets, order, sum
        #: True from the epilogue's begin until it has reduced: then it collects the gradients.
        self._in_epilogue = False
        #: By the bucket's key: this rank's reduced gradients, of the parameters' shapes.
        self._reduced_before: dict[Any, torch.Tensor] = {}
        #: Gradients that the reduction stream may still read: kept alive until the next reduction.
        self._being_read: list[torch.Tensor] = []
        #: By key: expanded zeros in place of a reduced gradient whose memory is used again.
        self._zeros: dict[Any, torch.Tensor] = {}
        #: True if a bucket was reduced in this backward.
        self.has_reduced = False

    def begin_backward(self) -> None:
        """Drop the reduced gradients of the last backward, as one begins or has raised."""
        self._reduced_before.clear()
        self._being_read = []
        self.has_reduced = self._in_epilogue = False
        if self._order is not None:
            self._order.begin_backward()

    def begin_epilogue(self) -> None:
        """Fill the last bucket as on all ranks, before the epilogue reduces it."""
        if self._order is not None:
            self._order.end_backward()
        self._in_epilogue = True

    def reduce(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Reduce the buckets once all ranks have the same parameters in them."""
        buckets, only_bucket = self._buckets, self._buckets.single
        in_epilogue, self._in_epilogue = self._in_epilogue, False  # calls inside this are not last
        keys = [*only_bucket.params] if only_bucket else buckets.contents(*args, **kwargs)
        # The buckets are empty if DeepSpeed reduces a parameter larger than a bucket.
        if keys and (self._order is None or self._order.admits(keys)):
            self.has_reduced = True
            gradients = [*only_bucket.grads] if only_bucket else buckets.gradients(*args, **kwargs)
            # DeepSpeed puts a parameter's second gradient into the bucket again. If the bucket
            # overflows, it is reduced with it, and the gradient goes first into the empty bucket.
            differs = len({*keys}) < len(keys)
            firsts = keys if not buckets.is_single else keys[:1]
            for key, gradient in zip(firsts, gradients, strict=False):  # inlined for speed
                held = getattr(buckets.parameters[key], buckets.attribute)
                differs |= buckets.keeps_gradients and held is not gradient
            if differs:
                buckets.refill()
                keys = buckets.contents(*args, **kwargs)
                gradients = buckets.gradients(*args, **kwargs)
            if self._sum.divisor > 1 or not self._reduced_before.keys().isdisjoint(keys):
                self._add(wrapped, args, kwargs, keys, gradients)
            else:
                wrapped(*args, **kwargs)
                if buckets.keeps_gradients:
                    self._being_read = self._detach_reduced(keys, gradients)
        if in_epilogue:
            self._restore()

    def _add(
        self,
        run: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        keys: list[Any],
        gradients: list[torch.Tensor],
    ) -> None:
        """Reduce the buckets by `run`, divide, and add the gradients that were reduced before."""
        buckets, divisor = self._buckets, self._sum.divisor
        if divisor > 1 and buckets.knows_producers:
            with buckets.reduction_stream(behind_producers=True):
                divide(buckets.tensors(*args, **kwargs), divisor)
            divisor = 1
        with layered(buckets.optimizer, copy_grads_in_partition=self._copy_to_partition):
            run(*args, **kwargs)
        if buckets.keeps_gradients:
            with buckets.reduction_stream(), torch.no_grad():
                self._being_read = self._detach_reduced(keys, gradients, divisor)

    def _copy_to_partition(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Copy a parameter's first reduced gradient to the partition; later ones are added."""
        param = args[0] if args else kwargs["param"]
        if self._buckets.key_of(param) not in self._reduced_before:
            wrapped(*args, **kwargs)

    def _detach_reduced(
        self, keys: list[Any], gradients: list[torch.Tensor], divisor: int = 1
    ) -> list[torch.Tensor]:
        """Remove the reduced gradients from their parameters, and add those reduced before.

        Clear DeepSpeed's notes of reduced parameters. Return the gradients that are not kept.
        """
        buckets, reduced_before, not_kept = self._buckets, self._reduced_before, []
        marks = buckets.optimizer.params_already_reduced
        for key, gradient in zip(keys, gradients, strict=True):
            setattr(buckets.parameters[key], buckets.attribute, None)
            marks[key[-1]] = False
            reduced = gradient.data  # a new object: DeepSpeed may replace the memory of `gradient`
            if divisor > 1:
                divide([reduced], divisor)
            if key in buckets.stays_on_parameter and key not in reduced_before:
                reduced_before[key] = reduced
                continue
            if key in reduced_before:
                reduced_before[key].add_(reduced)
            else:
                not_kept.append(reduced)
            if buckets.reuses_buffer:
                if key not in self._zeros:
                    self._zeros[key] = gradient.new_zeros(()).expand_as(gradient)
                gradient.data = self._zeros[key]
        if buckets.defers_clearing:
            zero12.clear_previous_gradients(buckets.optimizer)
        return not_kept

    def _restore(self) -> None:
        """Give the parameters the gradients of this backward, which the epilogue collects."""
        attribute, parameters = self._buckets.attribute, self._buckets.parameters
        for key, gradient in self._reduced_before.items():
            setattr(parameters[key], attribute, gradient)
        self._reduced_before.clear()
