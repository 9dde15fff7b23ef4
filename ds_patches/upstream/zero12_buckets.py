"""The reduce buckets of stages 1 and 2: from 0.17.2 one for each dtype, before a single one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import accelerator, keeps_order, wait_for_current
from ds_patches.upstream.classes import ZERO12, class_of


def producers(optimizer: Any) -> list[set[Any]]:
    """Return for each bucket the streams that filled it; none before 0.19.3.

    The reduction waits for all of these. They are the buckets' own, and change with them.
    """
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return [bucket.copy_streams for bucket in buckets if hasattr(bucket, "copy_streams")]


def buckets_turned_back(optimizer: Any) -> list[Any]:
    """Return the buckets that begin anew in their first buffer, which may be being reduced.

    All of 0.17.2 to 0.18.4.
    """
    return [
        bucket
        for bucket in getattr(optimizer, "ipg_buckets", {}).values()
        if "index" in live.innermost(type(bucket).clear).__code__.co_names
    ]


def reduce_together(optimizer: Any) -> bool:
    """Return True if several ranks share the optimizer's reduce buckets, and it has no experts."""
    several = dist.get_world_size(optimizer.dp_process_group) > 1
    experts = optimizer.has_moe_layers  # which reduce over other ranks
    return class_of(optimizer) == ZERO12 and several and not experts


class ReduceBuckets:
    """The reduce buckets of one optimizer.

    A parameter's key is what is kept of it in a bucket, or up to 0.17.1 its number.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._own = getattr(optimizer, "ipg_buckets", None)
        #: The one bucket that there is, as a rule.
        self.only = next(iter(self._own.values())) if self._own and len(self._own) == 1 else None
        #: Whether the gradients in it are there in the order in which they came.
        self.is_one = self._own is None or self.only is not None
        #: By key.
        self.parameters: dict[Any, torch.nn.Parameter] = {}
        self._group_of: dict[Any, int] = {}
        self._keys: dict[int, Any] = {}
        for group, params in enumerate(optimizer.bit16_groups):
            for index, param in enumerate(params):
                number = optimizer.get_param_id(param)
                key = number if self._own is None else (group, index, number)
                self._keys[number], self._group_of[key] = key, group
                self.parameters[key] = param
        self.numbers = {key: number for number, key in self._keys.items()}
        #: Where a parameter's gradient is until it is reduced.
        self.attribute = zero12.gradient_attribute(optimizer)
        in_place = {g: zero12.sums_in_place(optimizer, g) for g in {*self._group_of.values()}}
        #: Whether a reduction leaves nothing else on the parameters. To 0.19.7 fp32 sums of stage 1
        #: stay there, and copies of them are reduced.
        self.keeps_gradients = self.attribute == "grad" or any(in_place.values())
        #: The keys of this rank's parameters on which DeepSpeed leaves reduced gradients: an
        #: offloaded optimizer has them on the host, one that sums in place in its partition.
        self.stays_on_parameter = {
            key
            for key, group in self._group_of.items()
            if not (optimizer.cpu_offload or in_place[group])
            and optimizer.is_param_in_current_partition[self.numbers[key]]
        }
        #: Whether it is known which streams fill a bucket, before it is reduced. If not, to 0.19.2,
        #: all that is reduced stays on the parameters, but for an offloaded optimizer.
        beside = optimizer.overlap_comm and not keeps_order() and not optimizer.cpu_offload
        self.knows_producers = not beside or bool(producers(optimizer))
        #: Whether DeepSpeed clears the gradients of other ranks at the next reduction.
        self.clears_later = optimizer.overlap_comm and not optimizer.contiguous_gradients
        #: Whether a bucket has the memory of the one that was reduced before.
        self.memory_is_next = optimizer.contiguous_gradients and not optimizer.overlap_comm
        #: Several buckets are reduced one by one: from 0.18.5 on.
        code = live.innermost(type(optimizer).reduce_ipg_grads).__code__
        takes_dtype = "comm_dtype" in code.co_varnames[: code.co_argcount]
        self._are_reduced_apart = not self.is_one and takes_dtype
        self.group = optimizer.dp_process_group
        self.device = torch.device(accelerator().current_device_name())
        #: Around what a gradient comes to, where it is asked whether it goes on into a bucket.
        self.diversion: Layer | None = None

    def key_of(self, param: Any) -> Any:
        """Return the key of a parameter."""
        return self._keys[self.optimizer.get_param_id(param)]

    def contents(self, comm_dtype: torch.dtype | None = None) -> list[Any]:
        """Return the keys in the buckets, or in the one of a dtype (0.18.5 and later)."""
        if self._own is None:
            return [entry[-1] for entry in self.optimizer.params_in_ipg_bucket]
        buckets = self._own.values() if comm_dtype is None else [self._own[comm_dtype]]
        return [key for bucket in buckets for key in bucket.params]

    def gradients(self, comm_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the gradients in the buckets, in the order of their `contents`."""
        optimizer = self.optimizer
        if self._own is None:
            return list(optimizer.grads_in_ipg_bucket)
        buckets = self._own.values() if comm_dtype is None else [self._own[comm_dtype]]
        return [gradient for bucket in buckets for gradient in bucket.grads]

    def fill_anew(self) -> None:
        """Put the gradient of each parameter in the buckets into them once.

        Zeros, if it has been reduced: ranks have their parameters in the same buckets.
        """
        for key in dict.fromkeys(self.take_out()):
            self.put_in(key)

    def gradient_of(self, key: Any) -> torch.Tensor | None:
        """Return a parameter's unreduced gradient, of its shape."""
        gradient: torch.Tensor | None
        gradient = self.optimizer.get_gradient_for_reduction(self.parameters[key])
        return gradient

    def take_out(self) -> list[Any]:
        """Empty the buckets: give each gradient back to its parameter. Return what they held."""
        optimizer, keys = self.optimizer, self.contents()
        if not keys:
            return keys
        if optimizer.overlap_comm and not keeps_order():
            # Upstream takes the other buffer next, which waits for this one's reduction.
            accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        for key in dict.fromkeys(keys):
            gradient = self.gradient_of(key)
            fits = self.parameters[key].numel() <= optimizer.reduce_bucket_size
            if gradient is not None and optimizer.contiguous_gradients and fits:
                gradient.data = gradient.data.clone()  # it is in the bucket
        zero12.forget_buckets(optimizer)
        return keys

    def put_in(self, key: Any) -> None:
        """Put in a parameter's gradient, or zeros if it has none; may reduce the bucket before."""
        optimizer, param = self.optimizer, self.parameters[key]
        zero12.set_up_buckets(optimizer)
        if self.gradient_of(key) is None:
            zero12.give_zero_gradient(optimizer, param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, self._group_of[key])

    def reduce_earlier_backwards(self, held: Iterable[Any] = ()) -> None:
        """Reduce what stage 1 leaves out with overlap_comm, in a step's last backward.

        held: the keys whose gradients have come, and wait for their turn.
        """
        held, reduced = {*self.contents(), *held}, self.optimizer.params_already_reduced
        left = [
            key
            for key, param in self.parameters.items()
            if getattr(param, self.attribute, None) is not None
            and key not in held
            and not reduced[self.numbers[key]]
        ]
        for key in left:
            if self.gradient_of(key) is not None:  # else the order of the ranks has had it reduced
                group = self._group_of[key]
                self.optimizer.reduce_ready_partitions_and_remove_grads(self.parameters[key], group)

    def reduce(self, key: Any) -> None:
        """Reduce the bucket that holds `key`, as if the next gradient did not fit into it."""
        optimizer = self.optimizer
        dtype = None if self.is_one else optimizer.get_param_comm_dtype(self.parameters[key])
        optimizer.reduce_ipg_grads(*([dtype] if self._are_reduced_apart else []))
        if optimizer.contiguous_gradients and optimizer.overlap_comm:
            if self._own is None:
                optimizer.ipg_index = 1 - optimizer.ipg_index
            else:
                bucket = self.only or self._own[dtype]
                bucket.index = 1 - bucket.index

    def tensors(self, comm_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return what the buckets, or the one of a dtype, will reduce: 0.17.2 and later."""
        optimizer = self.optimizer
        tensors: list[torch.Tensor] = []
        for dtype, bucket in (self._own or {}).items():
            if not bucket.params or comm_dtype not in (None, dtype):
                continue
            if (param := optimizer.extra_large_param_to_reduce.get(dtype)) is not None:
                tensors.append(optimizer.get_gradient_for_reduction(param))
            elif not optimizer.contiguous_gradients:
                tensors += bucket.grads
            else:
                tensors.append(bucket.buffer[bucket.index][: bucket.elements])
        return tensors

    @contextmanager
    def reduction_stream(self, behind_producers: bool = False) -> Iterator[None]:
        """Queue work behind the reductions that are queued, and behind what fills the buckets."""
        optimizer = self.optimizer
        if not optimizer.overlap_comm or keeps_order():
            yield
            return
        if behind_producers:
            wait_for_current(optimizer.reduction_stream)
            for stream in set().union(*producers(optimizer)):
                optimizer.reduction_stream.wait_stream(stream)
        with accelerator().stream(optimizer.reduction_stream):
            yield

    @property
    def come_late(self) -> bool:
        """True if all gradients come before the first is reduced: stage 1 without overlap."""
        return not (self.optimizer.partition_gradients or self.optimizer.overlap_comm)

    def divert(self, put: Callable[[Any], bool]) -> None:
        """Ask `put` whether a gradient that comes goes on, into a bucket."""
        self.let_in()
        method = "reduce_ready_partitions_and_remove_grads"
        self.diversion = Layer(self.optimizer, method, self._instead(put))

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
            is_whole = getattr(param, "ds_grad_is_ready", True)  # else of a tiled computation
            if is_whole and put(self.key_of(param)):
                wrapped(param, group)

        return instead
