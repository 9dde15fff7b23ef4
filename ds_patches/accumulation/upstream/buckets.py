"""The reduce buckets of stages 1 and 2: from 0.17.2 one for each dtype, before a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.runtime.attributes import Shadow
from ds_patches.runtime.device import accelerator, keeps_order
from ds_patches.runtime.graph_task import reaches
from ds_patches.runtime.handshake import MOST_RANKS, Handshake

from . import flat


def may_differ(optimizer: Any) -> bool:
    """Whether ranks may fill its buckets unlike each other, and can tell."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return (
        type(optimizer) is DeepSpeedZeroOptimizer  # ZenFlow's is a subclass
        and 1 < dist.get_world_size(optimizer.dp_process_group) <= MOST_RANKS
        and not optimizer.has_moe_layers  # experts reduce over other ranks
    )


class ReduceBuckets:
    """Those of one optimizer.

    A parameter is known by what is kept of it in a bucket, or up to 0.17.1 by its number.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._own = getattr(optimizer, "ipg_buckets", None)
        self._only = next(iter(self._own.values())) if self._own and len(self._own) == 1 else None
        #: Whether what waits in it lies there as it came.
        self.is_one = self._own is None or self._only is not None
        self._params: dict[Any, tuple[Any, int]] = {}
        self._keys: dict[int, Any] = {}
        for group, params in enumerate(optimizer.bit16_groups):
            for index, param in enumerate(params):
                number = optimizer.get_param_id(param)
                key = number if self._own is None else (group, index, number)
                self._keys[number], self._params[key] = key, (param, group)
        self.params = frozenset(self._params)
        self.group = optimizer.dp_process_group
        self.device = torch.device(accelerator().current_device_name())
        self._diversion: Shadow | None = None
        self._handshake: Handshake | None = None

    def waiting(self, comm_dtype: torch.dtype | None = None) -> list[Any]:
        """What is in the buckets and not reduced yet; from 0.18.5 also in the one of a dtype."""
        if self._only is not None:
            return [*self._only.params]
        if self._own is not None and comm_dtype is not None:
            return [*self._own[comm_dtype].params]
        waiting = flat.in_buckets(self._optimizer)
        return [entry[-1] for entry in waiting] if self._own is None else waiting

    def take_out(self) -> list[Any]:
        """Give what waits back to its parameters; returns what that was."""
        optimizer, waiting = self._optimizer, self.waiting()
        if not waiting:
            return waiting
        if optimizer.overlap_comm and not keeps_order():
            # Upstream takes the other buffer next, which waits for this one's reduction.
            accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        for key in waiting:
            param, _ = self._params[key]
            gradient = optimizer.get_gradient_for_reduction(param)
            if optimizer.contiguous_gradients and param.numel() <= optimizer.reduce_bucket_size:
                gradient.data = gradient.data.clone()  # it lay in the bucket
        flat.forget_buckets(optimizer)
        return waiting

    def put_in(self, key: Any) -> None:
        """Put in a parameter's gradient, or zeros if it has none; may reduce what waits."""
        optimizer, (param, group) = self._optimizer, self._params[key]
        flat.set_up_buckets(optimizer)
        if optimizer.get_gradient_for_reduction(param) is None:
            flat.give_zero_gradient(optimizer, param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, group)

    def reached(self) -> set[Any]:
        """Inside a backward: what it brings gradients to, but for backwards within it.

        Nothing at stage 1 without overlap_comm, where all have come before the first is reduced.
        """
        if not (self._optimizer.partition_gradients or self._optimizer.overlap_comm):
            return set()
        return {key for key, (param, _) in self._params.items() if reaches(param)}

    def divert(self, put: Callable[[Any], bool] | None) -> None:
        """Ask `put` whether a gradient that comes goes on, into a bucket; None: as ever."""
        if self._diversion is not None:
            self._diversion.remove()
            self._diversion = None
        if put is not None:
            self._diversion = Shadow(
                self._optimizer, "reduce_ready_partitions_and_remove_grads", self._instead(put)
            )

    def _instead(self, put: Callable[[Any], bool]) -> Callable[..., None]:
        def instead(wrapped: Any, param: Any, group: int) -> None:
            # A gradient that comes in pieces is told when it is whole.
            is_whole = getattr(param, "ds_grad_is_ready", True)
            if is_whole and put(self._keys[self._optimizer.get_param_id(param)]):
                wrapped(param, group)

        return instead

    def any_rank(self, says: bool) -> bool:
        """Whether one of the ranks says so; the host waits for the other hosts, and no device."""
        if self._handshake is None:
            ranks = dist.get_process_group_ranks(self.group)
            self._handshake = Handshake(ranks, "in this backward,")
        self._handshake.begin()
        return self._handshake.leave(int(says)) or says
