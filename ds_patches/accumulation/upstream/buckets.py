"""The reduce buckets of stages 1 and 2: from 0.17.2 one for each dtype, before a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.runtime.attributes import Shadow
from ds_patches.runtime.device import accelerator, keeps_order

from . import flat


def may_differ(optimizer: Any) -> bool:
    """Whether its buckets are of one group of ranks, and of more than one."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return (
        type(optimizer) is DeepSpeedZeroOptimizer  # ZenFlow's is a subclass
        and dist.get_world_size(optimizer.dp_process_group) > 1
        and not optimizer.has_moe_layers  # experts reduce over other ranks
    )


class ReduceBuckets:
    """Those of one optimizer; its parameters by upstream's numbers."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._params = {
            optimizer.get_param_id(param): (param, group)
            for group, params in enumerate(optimizer.bit16_groups)
            for param in params
            if param.requires_grad
        }
        self.trained = frozenset(self._params)
        self.group = optimizer.dp_process_group
        self.device = torch.device(accelerator().current_device_name())
        self._diversion: Shadow | None = None

    def waiting(self) -> list[int]:
        """What is in the buckets and not reduced yet."""
        buckets = getattr(self._optimizer, "ipg_buckets", None)
        if buckets is None:
            return [entry[-1] for entry in self._optimizer.params_in_ipg_bucket]
        return [entry[-1] for bucket in buckets.values() for entry in bucket.params]

    def take_out(self) -> list[int]:
        """Give what waits back to its parameters; returns what that was."""
        optimizer, waiting = self._optimizer, self.waiting()
        if waiting and optimizer.overlap_comm and not keeps_order():
            # Upstream takes the other buffer next, which waits for this one's reduction.
            accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        for number in waiting:
            param, _ = self._params[number]
            gradient = optimizer.get_gradient_for_reduction(param)
            if optimizer.contiguous_gradients and param.numel() <= optimizer.reduce_bucket_size:
                gradient.data = gradient.data.clone()  # it lay in the bucket
        flat.forget_buckets(optimizer)
        return waiting

    def put_in(self, number: int) -> None:
        """Put in a parameter's gradient, or zeros if it has none; may reduce what waits."""
        optimizer, (param, group) = self._optimizer, self._params[number]
        flat.set_up_buckets(optimizer)
        if optimizer.get_gradient_for_reduction(param) is None:
            flat.give_zero_gradient(optimizer, param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, group)

    def divert(self, put: Callable[[int], None] | None) -> None:
        """Let gradients that come be given to `put`, and not to a bucket; None: as ever."""
        if self._diversion is not None:
            self._diversion.remove()
            self._diversion = None
        if put is None:
            return

        def instead(wrapped: Any, param: Any, group: int) -> None:
            # A gradient that comes in pieces is told when it is whole.
            if getattr(param, "ds_grad_is_ready", True):
                put(self._optimizer.get_param_id(param))

        self._diversion = Shadow(
            self._optimizer, "reduce_ready_partitions_and_remove_grads", instead
        )

    def any_rank(self, says: bool) -> bool:
        """Whether one of the ranks says so."""
        said = torch.tensor(int(says), device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        return bool(said.item())
