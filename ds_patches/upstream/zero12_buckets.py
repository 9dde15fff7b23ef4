"""The reduce buckets of stages 1 and 2: one for each dtype from 0.17.2, before a single one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.upstream import zero12
from ds_patches.upstream.accelerator import accelerator, is_single_stream, wait_for_current


def producers(optimizer: Any) -> list[set[Any]]:
    """Return, for each bucket, the set of streams that filled it; no sets before 0.19.3.

    The reduction waits for these streams. The sets are DeepSpeed's own, and change with the bucket.
    """
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return [bucket.copy_streams for bucket in buckets if hasattr(bucket, "copy_streams")]


class ReduceBuckets:
    """The reduce buckets of one optimizer.

    A parameter's key is its group, its index in the group, and its id, as in the buckets' entries.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._buckets = getattr(optimizer, "ipg_buckets", None)
        buckets = [*(self._buckets or {}).values()]
        #: The bucket, if there is one of a single dtype, as in most models; None up to 0.17.1.
        self.single = buckets[0] if len(buckets) == 1 else None
        #: True if there is one bucket, whose gradients are in the order of their arrival.
        self.is_single = self._buckets is None or self.single is not None
        #: Parameters by key.
        self.parameters: dict[Any, torch.nn.Parameter] = {
            (group, index, optimizer.get_param_id(param)): param
            for group, params in enumerate(optimizer.bit16_groups)
            for index, param in enumerate(params)
        }
        self._keys = {key[-1]: key for key in self.parameters}
        #: The attribute of a parameter that holds its gradient until it is reduced.
        self.attribute = zero12.gradient_attribute(optimizer)
        #: True if the parameters' own gradients are reduced. To 0.19.7, copies of the fp32 sums of
        #: stage 1 are reduced, and the sums stay on the parameters.
        self.keeps_gradients = self.attribute == "grad" or zero12.any_sums_in_place(optimizer)
        #: The keys of this rank's parameters on which DeepSpeed leaves reduced gradients. An
        #: offloaded optimizer moves them to the host; one that sums in place, to its partition.
        self.stays_on_parameter = {
            key
            for key in self.parameters
            if not (optimizer.cpu_offload or zero12.sums_in_place(optimizer, key[0]))
            and optimizer.is_param_in_current_partition[key[-1]]
        }
        #: True if the streams that fill a bucket are known before it is reduced. If not (up to
        #: 0.19.2), reduced gradients stay on the parameters, except with an offloaded optimizer.
        overlaps = optimizer.overlap_comm and not is_single_stream() and not optimizer.cpu_offload
        self.knows_producers = not overlaps or bool(producers(optimizer))
        #: True if DeepSpeed clears other ranks' gradients at the next reduction only.
        self.defers_clearing = optimizer.overlap_comm and not optimizer.contiguous_gradients
        #: True if a bucket uses the memory of the bucket that was reduced before.
        self.reuses_buffer = optimizer.contiguous_gradients and not optimizer.overlap_comm
        # From 0.18.5 on each bucket is reduced by itself, by its dtype.
        code = live.innermost(type(optimizer).reduce_ipg_grads).__code__
        takes_dtype = "comm_dtype" in code.co_varnames[: code.co_argcount]
        self._are_reduced_apart = not self.is_single and takes_dtype
        self.group = optimizer.dp_process_group
        #: The wrapper of `divert`.
        self.diversion: Layer | None = None

    def key_of(self, param: Any) -> Any:
        """Return the key of a parameter."""
        return self._keys[self.optimizer.get_param_id(param)]

    def contents(self, comm_dtype: torch.dtype | None = None) -> list[Any]:
        """Return the keys in all buckets, or in the bucket of a dtype (0.18.5 and later)."""
        if self._buckets is None:
            # Up to 0.16.2 an entry has the parameter in place of its index.
            return [self._keys[entry[-1]] for entry in self.optimizer.params_in_ipg_bucket]
        buckets = self._buckets.values() if comm_dtype is None else [self._buckets[comm_dtype]]
        return [key for bucket in buckets for key in bucket.params]

    def gradients(self, comm_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the gradients in the buckets, in the order of their `contents`."""
        optimizer = self.optimizer
        if self._buckets is None:
            return list(optimizer.grads_in_ipg_bucket)
        buckets = self._buckets.values() if comm_dtype is None else [self._buckets[comm_dtype]]
        return [gradient for bucket in buckets for gradient in bucket.grads]

    def refill(self) -> None:
        """Fill the buckets again, with one gradient for each parameter that they held.

        Zeros replace a reduced gradient: ranks must hold the same parameters in a bucket.
        """
        for key in dict.fromkeys(self.empty()):
            self.put(key)

    def gradient_of(self, key: Any) -> torch.Tensor | None:
        """Return a parameter's unreduced gradient, of its shape, or None."""
        gradient: torch.Tensor | None
        gradient = self.optimizer.get_gradient_for_reduction(self.parameters[key])
        return gradient

    def empty(self) -> list[Any]:
        """Empty the buckets, and give each gradient back to its parameter. Return their keys."""
        optimizer, keys = self.optimizer, self.contents()
        if not keys:
            return keys
        if optimizer.overlap_comm and not is_single_stream():
            # DeepSpeed fills the other buffer next, which waits for this one's reduction.
            accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        for key in dict.fromkeys(keys):
            gradient = self.gradient_of(key)
            fits = self.parameters[key].numel() <= optimizer.reduce_bucket_size
            if gradient is not None and optimizer.contiguous_gradients and fits:
                gradient.data = gradient.data.clone()  # out of the bucket's memory
        zero12.reset_buckets(optimizer)
        return keys

    def put(self, key: Any) -> None:
        """Add a parameter's gradient, or zeros, to its bucket; a full one is reduced first."""
        optimizer, param = self.optimizer, self.parameters[key]
        zero12.set_up_buckets(optimizer)
        if self.gradient_of(key) is None:
            zero12.set_zero_gradient(optimizer, param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, key[0])

    def reduce_earlier_backwards(self, held: Iterable[Any] = ()) -> None:
        """Reduce the earlier backwards' gradients that stage 1 with overlap_comm leaves out.

        held: keys of gradients that have arrived, and are reduced later.
        """
        held, reduced = {*self.contents(), *held}, self.optimizer.params_already_reduced
        unreduced = [
            key
            for key, param in self.parameters.items()
            if getattr(param, self.attribute, None) is not None
            and key not in held
            and not reduced[key[-1]]
        ]
        for key in unreduced:
            if self.gradient_of(key) is not None:  # else `BucketOrder` has reduced it meanwhile
                param = self.parameters[key]
                self.optimizer.reduce_ready_partitions_and_remove_grads(param, key[0])

    def reduce(self, key: Any) -> None:
        """Reduce the bucket that holds `key`, as if the next gradient did not fit into it."""
        optimizer = self.optimizer
        dtype = None if self.is_single else optimizer.get_param_comm_dtype(self.parameters[key])
        optimizer.reduce_ipg_grads(*([dtype] if self._are_reduced_apart else []))
        if optimizer.contiguous_gradients and optimizer.overlap_comm:
            if self._buckets is None:
                optimizer.ipg_index = 1 - optimizer.ipg_index
            else:
                bucket = self.single or self._buckets[dtype]
                bucket.index = 1 - bucket.index

    def tensors(self, comm_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the tensors to reduce, of all buckets or of one dtype's: 0.17.2 and later."""
        optimizer = self.optimizer
        tensors: list[torch.Tensor] = []
        for dtype, bucket in (self._buckets or {}).items():
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
        """Run work on the reduction stream, behind the reductions that are queued.

        behind_producers: also behind the streams that fill the buckets.
        """
        optimizer = self.optimizer
        if not optimizer.overlap_comm or is_single_stream():
            yield
            return
        if behind_producers:
            wait_for_current(optimizer.reduction_stream)
            for stream in set().union(*producers(optimizer)):
                optimizer.reduction_stream.wait_stream(stream)
        with accelerator().stream(optimizer.reduction_stream):
            yield

    @property
    def are_shared(self) -> bool:
        """True if all parameters are reduced over the same ranks, of which there are several."""
        return dist.get_world_size(self.group) > 1 and not self.optimizer.has_moe_layers

    @property
    def reduces_after_backward(self) -> bool:
        """True if all gradients arrive before the first reduction: stage 1 without overlap."""
        return not (self.optimizer.partition_gradients or self.optimizer.overlap_comm)

    def divert(self, accepts: Callable[[Any], bool]) -> None:
        """Ask `accepts` for each gradient, by its parameter's key, if it goes into a bucket."""

        def divert_gradient(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
            # Runs for every gradient: two positional arguments need no signature lookup.
            positional = len(args) == 2 and not kwargs
            param, group = args if positional else in_order(wrapped, args, kwargs)
            is_whole = getattr(param, "ds_grad_is_ready", True)  # False within tiled computations
            if is_whole and accepts(self.key_of(param)):
                wrapped(param, group)

        self.stop_diverting()
        method = "reduce_ready_partitions_and_remove_grads"
        self.diversion = Layer(self.optimizer, method, divert_gradient)

    def stop_diverting(self) -> None:
        """Remove the wrapper of `divert`."""
        if self.diversion is not None:
            self.diversion.remove()
            self.diversion = None
