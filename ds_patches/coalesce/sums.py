"""Gradients on the parameters of one optimizer, where autograd has added them up, and their end.

DeepSpeed's own reducer leaves out what has no gradient, so ranks that differ in what they have
would wait for each other in different collectives. So a parameter that has a gradient on another
rank alone takes part with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist

from ds_patches.steps.ranks import on_any
from ds_patches.upstream import zero3, zero3_gathers, zero12
from ds_patches.upstream.accelerator import keeps_order


class LocalSum(ABC):
    """What there is to do with the gradients on the parameters."""

    def __init__(self, optimizer: Any, group: Any) -> None:
        """`group`: the process group of the ranks that share the gradients."""
        self._optimizer, self._group = optimizer, group

    def is_late(self) -> bool:
        """Whether the backward that runs has brought gradients that are not on the parameters."""
        return False

    def is_empty(self) -> bool:
        """Whether no parameter has one."""
        return not any(map(self._has_one, self._parameters()))

    @abstractmethod
    def reduce(self, lacking: set[Any]) -> None:
        """Add to what the step has reduced, and clear; with zeros for `lacking`. A collective."""

    @abstractmethod
    def drop(self) -> None:
        """Forget them, and leave the optimizer as it is before a backward."""

    def lacking(self) -> set[Any] | None:
        """Return the parameters that have a gradient on another rank, and none here. A collective.

        None where no rank has a gradient. A rank that has all does not wait for what others tell.
        """
        params = [*self._parameters()]
        here = [self._has_one(param) for param in params]
        alone = dist.get_world_size(self._group) == 1
        told = on_any(here, self._group) if params and not alone else None
        if here and all(here):
            return set()
        anywhere = here if told is None else told.tolist()
        if not any(anywhere):
            return None
        return {p for p, one, any_ in zip(params, here, anywhere, strict=True) if any_ and not one}

    @abstractmethod
    def _parameters(self) -> Iterator[Any]:
        """Trainable, in an order that is the same on all ranks."""

    @abstractmethod
    def _has_one(self, param: Any) -> bool:
        """Whether a parameter has a gradient."""


class Zero12LocalSum(LocalSum):
    """Stages 1 and 2, by DeepSpeed's own reducer.

    A gradient is in ``grad`` or, at stage 1 with fp32 sums of a low precision model, in
    ``grad_accum``.
    """

    def is_late(self) -> bool:
        waiting = zero12.in_buckets(self._optimizer)
        return bool(waiting) or any(self._optimizer.params_already_reduced)

    def lacking(self) -> set[Any] | None:
        # The epilogue of each backward does it too, but not every backward has one: from 0.18.3
        # the second ``loss.backward()`` over one forward has none.
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer.fill_grad_accum_attribute()
        return super().lacking()

    def reduce(self, lacking: set[Any]) -> None:
        """As one backward: it has micro_step_id 0 and is at the boundary.

        With an offloaded optimizer, every release then copies it to the host whole.
        """
        optimizer = self._optimizer
        if optimizer.overlap_comm and not keeps_order():
            optimizer.reduction_stream.synchronize()  # what an earlier step left in the buckets
        zero12.release_buffers(optimizer)
        with zero12.reducing_what_it_steps_with(optimizer):
            zero12.set_up_buckets(optimizer)
            optimizer.micro_step_id = 0
            for group, params in enumerate(optimizer.bit16_groups):
                for param in filter(_is_trainable, params):
                    if param in lacking:
                        zero12.give_zero_gradient(optimizer, param)
                    if optimizer.get_gradient_for_reduction(param) is not None:
                        optimizer.reduce_ready_partitions_and_remove_grads(param, group)
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        zero12.clear(optimizer)

    def drop(self) -> None:
        zero12.clear(self._optimizer)
        zero12.release_buffers(self._optimizer)
        self._optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID

    def _parameters(self) -> Iterator[Any]:
        return filter(_is_trainable, chain(*self._optimizer.bit16_groups))

    def _has_one(self, param: Any) -> bool:
        return self._optimizer.get_param_gradient_attribute(param) is not None


class Zero3LocalSum(LocalSum):
    """Stage 3, by DeepSpeed's own reducer."""

    def is_late(self) -> bool:
        return bool(zero3.in_buckets(self._optimizer))

    def reduce(self, lacking: set[Any]) -> None:
        for param in self._parameters():
            if param in lacking:
                zero3.give_zero_gradient(param)
            if param.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(param)
        self._optimizer.independent_gradient_partition_epilogue()

    def drop(self) -> None:
        zero3.clear(self._optimizer)
        # Nothing waits there, but 0.17.2 never begins anew to count what a bucket holds. Full is
        # when to reduce: ranks must count alike, also after one of them alone has raised.
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        zero3_gathers.reset(self._optimizer.parameter_offload)

    def _parameters(self) -> Iterator[Any]:
        return filter(_is_trainable, chain(*self._optimizer.fp16_groups))

    def _has_one(self, param: Any) -> bool:
        return param.grad is not None


def _is_trainable(param: Any) -> bool:
    return bool(param.requires_grad)
