"""Stage 3: gradients of the backwards of a step add up in the partition buffer.

Each rank holds one flat slice per parameter. Stock copies into it or adds to it by a counter that
moves with the *forward* from 0.18.5 on, and never clears it: what an earlier step left there for
a parameter without a gradient stays, and is stepped with. Here a slice is copied into when its
step writes it first, added to from then on, and zeroed if its step has not written it at all.

A gradient that comes to a parameter again in one backward counts again. Autograd adds it to the one
in the reduce bucket, which then has the parameter twice: it is reduced once.
"""

from __future__ import annotations

from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.attached import KEY
from ds_patches.steps.graph_task import NO_TASK, current_task_id
from ds_patches.steps.sums import GradientSum, divide
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import zero3, zero3_gathers
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.classes import makes_muon_updates_in_backward

_SECOND_WITH_MUON = (
    "a second backward of one step, with Muon at ZeRO 3: this DeepSpeed orthogonalises each by "
    "itself, and not their sum. Upgrade to 0.19.8, or add the losses, or put the backwards into "
    "`with engine.coalesce_grad_reduction():`."
)


def around_partition_grads(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The stage 3 optimizer partitions the gradients of a bucket."""
    steps = vars(optimizer).get(KEY)
    if steps is None or not isinstance(steps.sum, Zero3Sum):
        return wrapped(*args, **kwargs)
    return steps.sum.partition(wrapped, *in_order(wrapped, args, kwargs))


class Zero3Sum(GradientSum):
    """Which gradient partitions of one stage 3 optimizer hold gradients of the present step."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._optimizer = optimizer = engine.optimizer
        self.layers.append(Layer(optimizer, zero3.REDUCING_METHOD, self._reduce_bucket))
        self._outer_task = NO_TASK
        self._nests = False  # a graph task has run inside a backward's
        self._has_reduced = False  # the backward a bucket
        if not is_single_stream():
            offload = optimizer.parameter_offload
            gathers = "pre_sub_module_backward_function"
            self.layers.append(Layer(offload, gathers, self._module_backward_begins))
        #: By ``ds_id``, the parameters whose partitions hold gradients of this step.
        self._written: dict[int, Any] = {}
        self._delivered: set[int] = set()  # of them, those that reached an offloaded optimizer

    def begin_backward(self) -> None:
        if self._written and makes_muon_updates_in_backward(self._optimizer):
            raise Refused(_SECOND_WITH_MUON)
        self._outer_task = current_task_id()
        self._has_reduced = False

    def _reduce_bucket(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed reduces a bucket, because it is full or as a backward ends."""
        optimizer = self._optimizer
        dtype = zero3.dtype_of_bucket(optimizer, *args, **kwargs)
        params = zero3.bucket_of(optimizer, dtype)
        if not params:
            return
        if len({*map(id, params)}) < len(params):
            zero3.deduplicate_bucket(optimizer, dtype)
        if self.divisor > 1:
            with zero3.reduction_stream(optimizer):
                divide([param.grad for param in params], self.divisor)
        self._has_reduced = True
        wrapped(*args, **kwargs)
        # For the next gradient alone, so not a layer, which all would pass.
        vars(optimizer)[zero3.BUCKETING_METHOD] = self._put

    def _put(self, param: Any) -> None:
        """DeepSpeed puts a gradient into the empty bucket, also one that was in the full one."""
        self._let_put()
        if param.grad is not None:
            getattr(self._optimizer, zero3.BUCKETING_METHOD)(param)

    def _let_put(self) -> None:
        vars(self._optimizer).pop(zero3.BUCKETING_METHOD, None)

    def _module_backward_begins(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """DeepSpeed gathers a module; here its next gradients come behind those in buckets."""
        self.order_behind_buckets(args[0] if args else kwargs["sub_module"])
        wrapped(*args, **kwargs)

    def order_behind_buckets(self, module: Any = None) -> None:
        """Make the gradients that come next, of a module or of any, wait for those in buckets.

        Only where graph tasks run inside a backward's: there a parameter may get another one.
        """
        self._nests |= current_task_id() not in (self._outer_task, NO_TASK)
        if self._nests:
            zero3.wait_for_buckets(self._optimizer, module)

    def partition(self, wrapped: Wrapped, params: list[Any], gradients: list[Any]) -> Any:
        """Stock's ``partition_grads``, made to copy what is new in this step, and to add else."""
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
        # Above zero means "add" to every release; the value itself means nothing else there.
        with meanwhile(optimizer, micro_step_id=int(adds)):
            return wrapped(params, gradients)

    def settle(self, *params: Any) -> dict[int, Any]:
        """Zero what earlier steps have left of these parameters, before a script looks.

        Returns those that train, by ``ds_id``.
        """
        by_id = {p.ds_id: p for p in params if p.requires_grad or p.ds_id in self._written}
        ids, written = by_id.keys(), self._written.keys()
        if written and (stale := ids - written):
            zero3.zero_gradients(self._optimizer, stale)
        optimizer = self._optimizer
        if optimizer.offload_optimizer and (late := (ids & written) - self._delivered):
            zero3.copy_to_host(optimizer, late)
        return by_id

    def given(self, by_id: dict[int, Any]) -> None:
        """Take what a script has put there for the gradients of this step so far."""
        if self._optimizer.offload_optimizer:
            zero3.copy_from_host(self._optimizer, by_id)
        self._written |= by_id
        self._delivered |= by_id.keys()

    def lacks(self, unreduced: bool) -> bool:
        optimizer = self._optimizer
        return not optimizer.offload_optimizer and upstream_boundary.lacks_averages(optimizer)

    def complete(self) -> None:
        """Zero what this step has not written; hand on what no boundary backward did.

        What was written counts, also of a parameter that was frozen since.
        """
        optimizer = self._optimizer
        if not self._written and not any(map(live.layer_of, live.chain(optimizer.partition_grads))):
            return  # a library has put its own there: what that has written is not ours to zero
        if unwritten := zero3.gradient_partitions(optimizer).keys() - self._written.keys():
            zero3.zero_gradients(optimizer, unwritten)
        if not optimizer.offload_optimizer:
            zero3.set_averages(
                optimizer, [p for p in self._written.values() if not p.requires_grad]
            )
        elif late := self._written.keys() - self._delivered:
            zero3.copy_to_host(optimizer, late)

    def drop(self) -> None:
        zero3.zero_gradients(self._optimizer, self._written)
        zero3.clear_gradients(self._optimizer)
        self.step_taken()

    def spare(self) -> None:
        zero3.partition_parameters(self._optimizer)

    def abandon(self) -> None:
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        self._optimizer.averaged_gradients = {}
        self._optimizer.micro_step_id = 0
        self.drop()

    def step_taken(self) -> None:
        self._written.clear()
        self._delivered.clear()

    def detach(self) -> None:
        """Leave the optimizer to stock, which in the middle of a step is to add to its sum."""
        super().detach()
        self._let_put()
        if self._written:
            self.complete()
            self._optimizer.micro_step_id = max(1, self._optimizer.micro_step_id)

    # --- Local gradients --------------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        return [param for group in self._optimizer.fp16_groups for param in group]

    def is_late(self) -> bool:
        return bool(zero3.params_in_buckets(self._optimizer))

    def has_come(self) -> bool:
        return self._has_reduced or self.is_late() or (self.holds_local and super().has_come())

    def reduce_local(self, lacking: set[Any]) -> None:
        for param in self.trained():
            if lacking and param in lacking:
                zero3.set_zero_gradient(param)
            if param.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(param)
        self._optimizer.independent_gradient_partition_epilogue()

    def drop_local(self) -> None:
        zero3.clear_gradients(self._optimizer)
        # Nothing waits there, but 0.17.2 never begins anew to count what a bucket holds. Full is
        # when to reduce: ranks must count alike, also after one of them alone has raised.
        zero3.empty_buckets(self._optimizer)
        zero3.partition_parameters(self._optimizer)
        zero3_gathers.reset_trace(self._optimizer.parameter_offload)
