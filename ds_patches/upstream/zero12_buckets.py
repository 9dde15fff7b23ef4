"""The reduce buckets of stages 1 and 2: from 0.17.2 one for each dtype, before a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import accelerator, keeps_order
from ds_patches.upstream.kinds import Kind, kind_of


def reduce_together(optimizer: Any) -> bool:
    """Whether several ranks share the optimizer's reduce buckets, and it has no experts."""
    several = dist.get_world_size(optimizer.dp_process_group) > 1
    experts = optimizer.has_moe_layers  # which reduce over other ranks
    return kind_of(optimizer) is Kind.ZERO12 and several and not experts


class ReduceBuckets:
    """The reduce buckets of one optimizer.

    A parameter is known by what is kept of it in a bucket, or up to 0.17.1 by its number.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._own = getattr(optimizer, "ipg_buckets", None)
        #: The one bucket that there is, as a rule.
        self.only = next(iter(self._own.values())) if self._own and len(self._own) == 1 else None
        #: Whether what waits in it lies there as it came.
        self.is_one = self._own is None or self.only is not None
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
        #: Around what a gradient comes to, where it is asked whether it goes on into a bucket.
        self.diversion: Layer | None = None

    def waiting(self, comm_dtype: torch.dtype | None = None) -> list[Any]:
        """Return what is in the buckets, or in the one of a dtype (0.18.5 and later)."""
        if self.only is not None:
            return [*self.only.params]
        if self._own is not None and comm_dtype is not None:
            return [*self._own[comm_dtype].params]
        waiting = zero12.in_buckets(self._optimizer)
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
        zero12.forget_buckets(optimizer)
        return waiting

    def put_in(self, key: Any) -> None:
        """Put in a parameter's gradient, or zeros if it has none; may reduce what waits."""
        optimizer, (param, group) = self._optimizer, self._params[key]
        zero12.set_up_buckets(optimizer)
        if optimizer.get_gradient_for_reduction(param) is None:
            zero12.give_zero_gradient(optimizer, param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, group)

    @property
    def come_late(self) -> bool:
        """Whether all gradients have come before the first is reduced: stage 1 without overlap."""
        return not (self._optimizer.partition_gradients or self._optimizer.overlap_comm)

    def param_of(self, key: Any) -> torch.nn.Parameter:
        """Return the parameter that is known by `key`."""
        param: torch.nn.Parameter = self._params[key][0]
        return param

    def divert(self, put: Callable[[Any], bool]) -> None:
        """Ask `put` whether a gradient that comes goes on, into a bucket."""
        self.let_in()
        method = "reduce_ready_partitions_and_remove_grads"
        self.diversion = Layer(self._optimizer, method, self._instead(put))

    def let_in(self) -> None:
        """Ask nobody any more."""
        if self.diversion is not None:
            self.diversion.remove()
            self.diversion = None

    def _instead(self, put: Callable[[Any], bool]) -> Callable[..., None]:
        def instead(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
            # Of every gradient: two in their order need no look at how the function names them.
            plain = len(args) == 2 and not kwargs
            param, group = args if plain else in_order(wrapped, args, kwargs)
            if zero12.is_whole(param) and put(self._keys[self._optimizer.get_param_id(param)]):
                wrapped(param, group)

        return instead
