"""Gradients on the parameters of one optimizer, where autograd has added them up, and their end.

DeepSpeed's own reducer leaves out what has no gradient, so ranks that differ in what they have
would wait for each other in different collectives: parameters without one then take part with
zeros.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from ds_patches.upstream import zero3, zero3_gathers, zero12
from ds_patches.upstream.accelerator import accelerator, keeps_order


class LocalSum(ABC):
    """What there is to do with the gradients on the parameters."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def is_late(self) -> bool:
        """Whether the backward that runs has brought gradients that are not on the parameters."""
        return False

    def is_empty(self) -> bool:
        """Whether no parameter has one."""
        return not any(self._present())

    def prepare(self) -> int:
        """Do what may fail on one rank alone.

        Returns 24 bits that are equal on all ranks if they have gradients of the same parameters,
        or if that makes no difference.
        """
        return zlib.crc32(bytes(self._present())) & 0xFFFFFF

    @abstractmethod
    def reduce(self, uneven: bool) -> None:
        """Add to what the step has reduced, and clear. A collective, after `prepare`.

        uneven: ranks have gradients of different parameters, or may have.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget them, and leave the optimizer as it is before a backward."""

    @abstractmethod
    def _present(self) -> list[bool]:
        """Whether each parameter has one."""


class Zero12LocalSum(LocalSum):
    """Stages 1 and 2, by DeepSpeed's own reducer.

    A gradient is in ``grad`` or, at stage 1 with fp32 sums of a low precision model, in
    ``grad_accum``.
    """

    def is_late(self) -> bool:
        waiting = zero12.in_buckets(self._optimizer)
        return bool(waiting) or any(self._optimizer.params_already_reduced)

    def prepare(self) -> int:
        # The epilogue of each backward does it too, but not every backward has one: from 0.18.3
        # the second ``loss.backward()`` over one forward has none.
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer.fill_grad_accum_attribute()
        return super().prepare()

    def reduce(self, uneven: bool) -> None:
        """As one backward: it has micro_step_id 0 and is at the boundary.

        With an offloaded optimizer, every release then copies it to the host whole.
        """
        optimizer = self._optimizer
        if uneven:
            for _, param in self._parameters():
                if optimizer.get_param_gradient_attribute(param) is None:
                    zero12.give_zero_gradient(optimizer, param)
        if optimizer.overlap_comm and not keeps_order():
            optimizer.reduction_stream.synchronize()  # what an earlier step left in the buckets
        zero12.release_buffers(optimizer)
        with zero12.reducing_what_it_steps_with(optimizer):
            self._set_up_buckets()
            for group, param in self._parameters():
                if optimizer.get_gradient_for_reduction(param) is not None:
                    optimizer.reduce_ready_partitions_and_remove_grads(param, group)
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        zero12.clear(optimizer)

    def drop(self) -> None:
        zero12.clear(self._optimizer)
        zero12.release_buffers(self._optimizer)
        self._optimizer.micro_step_id = zero12.INITIAL_MICRO_STEP_ID

    def _set_up_buckets(self) -> None:
        """Allocate the reduce buffers, as a backward does."""
        optimizer = self._optimizer
        zero12.set_up_buckets(optimizer)
        if not hasattr(optimizer, "process_gradients") and optimizer.contiguous_gradients:  # 0.16.4
            size, device = int(optimizer.reduce_bucket_size), accelerator().current_device_name()
            optimizer.ipg_buffer = [
                torch.empty(size, dtype=optimizer.dtype, device=device)
                for _ in range(2 if optimizer.overlap_comm else 1)
            ]
            optimizer.ipg_index = 0
        optimizer.micro_step_id = 0

    def _parameters(self) -> Iterator[tuple[int, Any]]:
        """Trainable, each with the index of its group."""
        for index, group in enumerate(self._optimizer.bit16_groups):
            yield from ((index, param) for param in group if param.requires_grad)

    def _present(self) -> list[bool]:
        gradient = self._optimizer.get_param_gradient_attribute
        return [gradient(param) is not None for _, param in self._parameters()]


class Zero3LocalSum(LocalSum):
    """Stage 3, by DeepSpeed's own reducer."""

    def is_late(self) -> bool:
        return bool(zero3.in_buckets(self._optimizer))

    def reduce(self, uneven: bool) -> None:
        for param in self._parameters():
            if param.grad is None and uneven:
                _give_zeros(param)
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
        """Trainable."""
        for group in self._optimizer.fp16_groups:
            yield from (param for param in group if param.requires_grad)

    def _present(self) -> list[bool]:
        return [param.grad is not None for param in self._parameters()]


def _give_zeros(param: Any) -> None:
    """Let a parameter without a gradient take part in the reduction."""
    partitioned = param.data
    # PyTorch takes a gradient in the shape of the data only, and that is released.
    param.data = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
    param.grad = torch.zeros_like(param.data)
    param.data = partitioned
