"""Stage 3: the sum of a step's gradients in the partition buffer.

Each rank holds a flat slice per parameter, its gradient partition. DeepSpeed copies or adds to it
by a counter that from 0.18.5 on moves with the *forward*, and never zeroes it: a parameter without
a gradient is stepped with that of an older step. Here the first gradient of a step is copied, later
ones are added, and partitions that the step has not written are zeroed.

If a parameter gets several gradients in one backward, autograd adds them to the one in the reduce
bucket, which then lists the parameter twice: it is reduced once.
"""

from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import NO_TASK, current_task_id
from ds_patches.steps.sums import GradientSum, divide
from ds_patches.steps.tracking import KEY
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero3, zero3_gathers
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.classes import makes_muon_updates_in_backward
from ds_patches.upstream.engine import has_torch_style_backward

_SECOND_WITH_MUON = (
    "a second backward of one step, with Muon at ZeRO 3: this DeepSpeed orthogonalises each by "
    "itself, and not their sum. Upgrade to 0.19.8, or add the losses, or put the backwards into "
    "`with engine.coalesce_grad_reduction():`."
)


def around_partition_grads(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Partition a bucket's gradients so that they add to those of the same step."""
    steps = vars(optimizer).get(KEY)
    if steps is None or not isinstance(steps.sum, Zero3Sum):
        return wrapped(*args, **kwargs)
    return steps.sum.partition(wrapped, *in_order(wrapped, args, kwargs))


class Zero3Sum(GradientSum):
    """The gradient partitions of one stage 3 optimizer, and which ones this step has written."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._optimizer = optimizer = engine.optimizer
        self._is_torch_style = has_torch_style_backward(engine)
        self.layers.append(Layer(optimizer, zero3.REDUCING_METHOD, self._reduce_bucket))
        self._outer_task = NO_TASK
        self._has_nested_task = False  # a graph task ran inside a backward's
        self._has_reduced = False  # the running backward has reduced a bucket
        if not is_single_stream():
            offload = optimizer.parameter_offload
            gathers = "pre_sub_module_backward_function"
            self.layers.append(Layer(offload, gathers, self._module_backward_begins))
        #: By ``ds_id``, the parameters whose partitions this step has written.
        self._written: dict[int, Any] = {}
        self._delivered: set[int] = set()  # their ids, if the offloaded optimizer has the gradient

    def begin_backward(self) -> None:
        if self._written and makes_muon_updates_in_backward(self._optimizer):
            raise Refused(_SECOND_WITH_MUON)
        self._outer_task = current_task_id()
        self._has_reduced = False

    def _reduce_bucket(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Divide a bucket's gradients and reduce each of its parameters once."""
        optimizer = self._optimizer
        bucket = zero3.bucket_of(optimizer, *args, **kwargs)
        params = bucket.params
        if not params:
            return
        if len({*map(id, params)}) < len(params):
            zero3.deduplicate_bucket(optimizer, bucket)
        if self.divisor > 1:
            with zero3.reduction_stream(optimizer):
                divide([param.grad for param in params], self.divisor)
        self._has_reduced = True
        wrapped(*args, **kwargs)
        # An attribute for the next gradient only. A layer would be called for every gradient.
        vars(optimizer)[zero3.BUCKETING_METHOD] = self._put_in_bucket

    def _put_in_bucket(self, param: Any) -> None:
        """Put a gradient into the emptied bucket, unless the full one held it."""
        vars(self._optimizer).pop(zero3.BUCKETING_METHOD, None)
        if param.grad is not None:
            getattr(self._optimizer, zero3.BUCKETING_METHOD)(param)

    def _module_backward_begins(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Make the next gradients of a module wait for those in the buckets."""
        self.order_behind_buckets(args[0] if args else kwargs["sub_module"])
        wrapped(*args, **kwargs)

    def order_behind_buckets(self, module: Any = None) -> None:
        """Make the next gradients of a module, or of all, wait for those in the buckets.

        Only if graph tasks run inside a backward's, where a parameter may get another gradient.
        """
        self._has_nested_task |= current_task_id() not in (self._outer_task, NO_TASK)
        if self._has_nested_task:
            zero3.wait_for_buckets(self._optimizer, module)

    def partition(self, wrapped: Wrapped, params: list[Any], gradients: list[Any]) -> Any:
        """Copy a step's first gradient of each parameter into its partition; add later ones."""
        optimizer = self._optimizer
        by_id = {param.ds_id: param for param in params}
        ids = by_id.keys()
        unwritten = ids - self._written.keys()
        adds = len(unwritten) < len(ids)
        if adds and unwritten:
            zero3.zero_gradients(optimizer, unwritten)
        self._written |= by_id
        if optimizer.offload_optimizer:
            self._delivered -= ids
            if upstream_boundary.is_at_boundary(optimizer):
                self._delivered |= ids
        if adds == (optimizer.micro_step_id > 0):
            return wrapped(params, gradients)
        # Every release adds if it is above 0, and uses it for nothing else here.
        with meanwhile(optimizer, micro_step_id=int(adds)):
            return wrapped(params, gradients)

    def zero_stale(self, *params: Any) -> dict[int, Any]:
        """Zero the partitions that this step has not written, before a script reads or sets them.

        Return the trainable ones of these parameters, by ``ds_id``.
        """
        by_id = {p.ds_id: p for p in params if p.requires_grad or p.ds_id in self._written}
        ids, written = by_id.keys(), self._written.keys()
        if written and (stale := ids - written):
            zero3.zero_gradients(self._optimizer, stale)
        optimizer = self._optimizer
        if optimizer.offload_optimizer and (undelivered := (ids & written) - self._delivered):
            zero3.copy_to_host(optimizer, undelivered)
        return by_id

    def mark_written(self, by_id: dict[int, Any]) -> None:
        """Count gradients that a script has set as those of this step."""
        if self._optimizer.offload_optimizer:
            zero3.copy_from_host(self._optimizer, by_id)
        self._written |= by_id
        self._delivered |= by_id.keys()

    def lacks_gradients(self, has_unreduced: bool) -> bool:
        optimizer = self._optimizer
        if optimizer.offload_optimizer or not upstream_boundary.lacks_averages(optimizer):
            return False
        return has_unreduced or not self.takes_zeros

    def complete(self) -> None:
        """Zero the partitions that this step has not written, and deliver those that it has.

        A parameter that was frozen after its gradient was written is stepped, too, whether or not
        it is trainable again.
        """
        optimizer = self._optimizer
        if not self._written and not any(map(live.layer_of, live.chain(optimizer.partition_grads))):
            return  # another library has replaced partition_grads, and writes the partitions
        if unwritten := zero3.gradient_partitions(optimizer).keys() - self._written.keys():
            zero3.zero_gradients(optimizer, unwritten)
        if not optimizer.offload_optimizer:
            if self.takes_zeros:
                zero3.set_missing_averages(optimizer)
            zero3.set_averages(optimizer, self._written)
        elif undelivered := self._written.keys() - self._delivered:
            zero3.copy_to_host(optimizer, undelivered)

    def drop(self) -> None:
        zero3.zero_gradients(self._optimizer, self._written)
        if not self._is_torch_style:  # no epilogue of another engine's backward
            zero3.empty_buckets(self._optimizer)
        zero3.clear_gradients(self._optimizer)
        self.step_taken()
        self.takes_zeros = True

    def end_empty_backward(self, failed: bool = False) -> bool:
        if failed:
            zero3.partition_parameters(self._optimizer)
        return False

    def drop_failed_backward(self) -> None:
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        self._optimizer.averaged_gradients = {}
        self._optimizer.micro_step_id = 0
        self.drop()

    def step_taken(self) -> None:
        self._written.clear()
        self._delivered.clear()
        self.takes_zeros = False

    def detach(self) -> None:
        """Remove the layers. In the middle of a step, let DeepSpeed add to its gradients."""
        super().detach()
        vars(self._optimizer).pop(zero3.BUCKETING_METHOD, None)
        if self._written:
            self.complete()
            self._optimizer.micro_step_id = max(1, self._optimizer.micro_step_id)

    # --- Local gradients --------------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        return [param for group in self._optimizer.fp16_groups for param in group]

    def has_nonlocal_gradients(self) -> bool:
        return self._has_reduced or bool(zero3.params_in_buckets(self._optimizer))

    def reduce_local(self, missing: set[Any]) -> None:
        for param in self.trainable():
            if missing and param in missing:
                zero3.set_zero_gradient(param)
            if param.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(param)
        self._optimizer.independent_gradient_partition_epilogue()

    def drop_local(self) -> None:
        zero3.clear_gradients(self._optimizer)
        # The buckets have no parameters, but 0.17.2 never resets the count of elements, by which it
        # decides that a bucket is full. Ranks must count alike, also after one of them has raised.
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        zero3_gathers.reset_trace(self._optimizer.parameter_offload)
