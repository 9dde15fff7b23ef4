"""Stage 3: all parameters gathered once, from a forward until everything is partitioned.

Meanwhile DeepSpeed's module hooks are removed: forwards and backwards run as in a plain module, and
ranks need not take the same way through it. Everything is partitioned by ``optimizer.step()``, by a
checkpoint, after a backward that raised, and at the end of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from torch.utils.hooks import unserializable_hook

from ds_patches.core.agreement import reduction_group
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import NO_TASK, at_end_of_task, current_task_id, with_graphs
from ds_patches.steps.ranks import on_any
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.zero3_sum import Zero3Sum
from ds_patches.upstream import zero3
from ds_patches.upstream import zero3_gathers as gathers
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.coverage import why_not_gather_once

_OLD_FORWARD = (
    "backward over a forward from before engine.step(): the parameters that it belongs to are "
    "gone. Run the forward again."
)
_open: WeakSet[GatherOnce] = WeakSet()


def of(engine: Any, steps: EngineSteps) -> GatherOnce:
    """Return the state of an engine at stage 3, one for all patches."""
    if steps.gather_once is None:
        steps.gather_once = GatherOnce(engine, steps)
    found: GatherOnce = steps.gather_once
    return found


def close_all() -> None:
    """Give the gathers of every engine back to DeepSpeed."""
    for gather_once in [*_open]:
        gather_once.close()


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` partitions its parameters; here they are gathered again at once.

    No module hook would do it, and the forward or backward that runs may need them.
    """
    result = wrapped(*args, **kwargs)
    for gather_once in [*_open]:
        gather_once.open()
    return result


class GatherOnce:
    """Whether the parameters of one engine are gathered once, and DeepSpeed's hooks removed.

    why_not: the setting because of which DeepSpeed gathers in each forward and backward, or None.
    """

    def __init__(self, engine: Any, steps: EngineSteps) -> None:
        self.why_not = why_not_gather_once(engine)
        self._engine, self._steps, self._sum = engine, steps, cast(Zero3Sum, steps.sum)
        self._offload = engine.optimizer.parameter_offload
        self._layers: list[Layer] = []  # while it is open
        self._task = NO_TASK  # the last backward over a forward without module hooks
        #: A hash of what was reduced while open; None after `differs`.
        self._order: int | None = None

    def begin(self) -> None:
        """Open at the next forward of the engine, and at each later one, until `end`."""
        self._handle = self._engine.register_forward_pre_hook(lambda *_: self.open())

    def end(self) -> None:
        """Close; gathered parameters stay so until `release`."""
        self._handle.remove()
        self.close()

    def open(self) -> None:
        """All-gather the partitioned parameters and remove the module hooks. Collective."""
        offload = self._offload
        gathers.gather_all(offload)
        if self._layers:
            return
        _open.add(self)
        self._order = self._order or 0
        optimizer, arrival = self._engine.optimizer, "reduce_ready_partitions_and_remove_grads"
        self._layers = [
            *gathers.block_releases(offload, self._partitioned),
            gathers.freeze_trace(offload),
            Layer(optimizer, zero3.REDUCING_METHOD, self._reduce_bucket),
            *([] if is_single_stream() else [Layer(optimizer, arrival, self._gradient_arrives)]),
        ]
        self._hooks = offload.forward_hooks
        self._restore = suspend([*offload.forward_hooks, *offload.backward_hooks])
        self._outputs = offload.module.register_forward_hook(self._keep_outputs)

    def close(self) -> None:
        """Put the module hooks back, and let DeepSpeed release; gathered parameters stay so."""
        if not self._layers:
            return
        _open.discard(self)
        for layer in self._layers:
            layer.remove()
        self._layers = []
        self._outputs.remove()
        if self._offload.forward_hooks is self._hooks:  # else a script removed all, as TRL does
            self._restore()

    def release(self) -> None:
        """Partition what was gathered, unless it is open again."""
        gathers.release_all(self._offload)

    def differs(self) -> bool:
        """Return True if ranks have reduced other gradients since the last call. Collective."""
        order, self._order = self._order, None
        if order is None:
            return False
        bits = [bool(order >> bit & 1) for bit in range(32)]
        group = reduction_group(self._engine)
        ones, zeros = on_any([*bits, *(not bit for bit in bits)], group).view(2, -1)
        return bool((ones & zeros).any())

    def _reduce_bucket(self, wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
        bucket = zero3.bucket_of(optimizer, zero3.dtype_of_bucket(optimizer, *args, **kwargs))
        self._order = hash((self._order, *(param.ds_id for param in bucket)))
        return wrapped(*args, **kwargs)

    def _gradient_arrives(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """No module hook orders the next gradient of a parameter behind that in a bucket."""
        wrapped(*args, **kwargs)
        self._sum.order_behind_buckets()

    def _partitioned(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """DeepSpeed partitions everything, or its module hooks come or go."""
        self.close()
        return wrapped(*args, **kwargs)

    def _keep_outputs(self, module: Any, inputs: Any, outputs: Any) -> None:
        """No hook gathers for the backward over this forward, which may come after `close`."""
        begins = unserializable_hook(partial(self._backward_begins, self._steps.steps_taken))  # type: ignore[no-untyped-call]
        for tensor in with_graphs(outputs):
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, step: int, gradient: Any) -> None:
        if self._task == current_task_id():
            return
        if step != self._steps.steps_taken:
            raise Refused(_OLD_FORWARD)
        self._task = current_task_id()
        gathers.gather_all(self._offload)
        if not self._layers:
            at_end_of_task(self.release)


def suspend(handles: Iterable[Any]) -> Callable[[], None]:
    """Take module hooks out, by their handles; return what puts them back in their old order.

    A handle whose hook or module is gone is left out, and other hooks may come and go meanwhile.
    """
    registries: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in handles:
        registry = handle.hooks_dict_ref()
        if registry is not None and handle.id in registry:
            registries.setdefault(id(registry), (registry, set()))[1].add(handle.id)
    taken = [(registry, dict(registry), keys) for registry, keys in registries.values()]
    for registry, _, keys in taken:
        for key in keys:
            del registry[key]

    def restore() -> None:
        for registry, before, keys in taken:
            now = dict(registry)
            registry.clear()
            registry.update((k, v) for k, v in before.items() if k in keys or k in now)
            registry.update((k, v) for k, v in now.items() if k not in before)

    return restore
