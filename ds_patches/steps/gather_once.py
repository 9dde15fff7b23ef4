"""Stage 3: all parameters are gathered once, and stay gathered until they are partitioned.

While an engine is open, DeepSpeed's module hooks are removed: forwards and backwards run as in a
plain module, and ranks may run different modules. ``optimizer.step()``, a checkpoint, a backward
that raised, and the end of a block partition the parameters.
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
from ds_patches.steps.graph_task import NO_TASK, at_end_of_task, current_task_id, graph_tensors
from ds_patches.steps.ranks import same_on_all_ranks
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.zero3_sum import Zero3Sum
from ds_patches.upstream import zero3
from ds_patches.upstream import zero3_gathers as gathers
from ds_patches.upstream.accelerator import is_single_stream
from ds_patches.upstream.coverage import why_not_gather_once

_OLD_FORWARD = (
    "backward over a forward from before engine.step(): the parameters that it used are gone. "
    "Run the forward again."
)
_open_states: WeakSet[GatherOnce] = WeakSet()


def state_of(engine: Any, steps: EngineSteps) -> GatherOnce:
    """Return the `GatherOnce` of a stage 3 engine, which all patches share."""
    if steps.gather_once is None:
        steps.gather_once = GatherOnce(engine, steps)
    state: GatherOnce = steps.gather_once
    return state


def close_all() -> None:
    """Put the module hooks of every open engine back."""
    for gather_once in [*_open_states]:
        gather_once.close()


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """All-gather the parameters that ``GatheredParameters`` has partitioned, in open engines.

    The running forward or backward may use them, and no module hook would gather them.
    """
    result = wrapped(*args, **kwargs)
    for gather_once in [*_open_states]:
        gather_once.open()
    return result


class GatherOnce:
    """The gathering of one engine's parameters: once while open, else by DeepSpeed's hooks.

    why_not: the setting that rules out gathering once, or None.
    """

    def __init__(self, engine: Any, steps: EngineSteps) -> None:
        self.why_not = why_not_gather_once(engine)
        self._engine, self._steps, self._sum = engine, steps, cast(Zero3Sum, steps.sum)
        self._offload = engine.optimizer.parameter_offload
        self._layers: list[Layer] = []  # not empty while open
        self._task_id = NO_TASK  # of the last backward over a forward without hooks
        #: Hash of the parameters reduced while open, in order; None after `orders_differ`.
        self._reduction_hash: int | None = None

    def begin(self) -> None:
        """Open the engine at its next forward, and at each later one, until `end`."""
        self._handle = self._engine.register_forward_pre_hook(lambda *_: self.open())

    def end(self) -> None:
        """Close the engine. Its gathered parameters stay gathered until `release`."""
        self._handle.remove()
        self.close()

    def open(self) -> None:
        """All-gather the partitioned parameters and remove the module hooks. Collective."""
        offload = self._offload
        gathers.gather_all(offload)
        if self._layers:
            return
        _open_states.add(self)
        self._reduction_hash = self._reduction_hash or 0
        optimizer, arrival = self._engine.optimizer, "reduce_ready_partitions_and_remove_grads"
        self._layers = [
            *gathers.block_releases(offload, self._close_and_run),
            Layer(optimizer, zero3.REDUCING_METHOD, self._reduce_bucket),
            *([] if is_single_stream() else [Layer(optimizer, arrival, self._gradient_arrives)]),
        ]
        self._handles = offload.forward_hooks
        self._restore_hooks = suspend([*offload.forward_hooks, *offload.backward_hooks])
        self._output_hook = offload.module.register_forward_hook(self._watch_outputs)

    def close(self) -> None:
        """Put the module hooks back. Gathered parameters stay gathered until `release`."""
        if not self._layers:
            return
        _open_states.discard(self)
        for layer in self._layers:
            layer.remove()
        self._layers = []
        self._output_hook.remove()
        if self._offload.forward_hooks is self._handles:  # else a script removed all, as TRL does
            self._restore_hooks()

    def release(self) -> None:
        """Partition the gathered parameters, unless the engine is open again."""
        gathers.release_all(self._offload)

    def orders_differ(self) -> bool:
        """Return True if ranks reduced different gradients since the last call. Collective."""
        order, self._reduction_hash = self._reduction_hash, None
        if order is None:
            return False
        return not same_on_all_ranks(order % 2**62, reduction_group(self._engine))

    def _reduce_bucket(self, wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
        params = zero3.bucket_of(optimizer, *args, **kwargs).params
        self._reduction_hash = hash((self._reduction_hash, *(param.ds_id for param in params)))
        return wrapped(*args, **kwargs)

    def _gradient_arrives(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Make the parameter's next gradient wait for this one: no module hook does it."""
        wrapped(*args, **kwargs)
        self._sum.order_behind_buckets()

    def _close_and_run(self, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Close before DeepSpeed partitions all parameters or changes its module hooks."""
        self.close()
        return wrapped(*args, **kwargs)

    def _watch_outputs(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Gather for a backward over this forward, which may run after `close`."""
        begins = unserializable_hook(partial(self._backward_begins, self._steps.steps_taken))  # type: ignore[no-untyped-call]
        for tensor in graph_tensors(outputs):
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, step: int, gradient: Any) -> None:
        if self._task_id == current_task_id():
            return
        if step != self._steps.steps_taken:
            raise Refused(_OLD_FORWARD)
        self._task_id = current_task_id()
        gathers.gather_all(self._offload)
        if not self._layers:
            at_end_of_task(self.release)


def suspend(handles: Iterable[Any]) -> Callable[[], None]:
    """Remove module hooks, by their handles. Return a function that restores their order.

    Skips handles whose hook or module is gone. Hooks added meanwhile are kept, behind the restored
    ones; hooks removed meanwhile by others stay removed.
    """
    registries: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in handles:
        registry = handle.hooks_dict_ref()
        if registry is not None and handle.id in registry:
            registries.setdefault(id(registry), (registry, set()))[1].add(handle.id)
    removed = [(registry, dict(registry), keys) for registry, keys in registries.values()]
    for registry, _, keys in removed:
        for key in keys:
            del registry[key]

    def restore() -> None:
        for registry, original, keys in removed:
            current = dict(registry)
            registry.clear()
            registry.update((k, v) for k, v in original.items() if k in keys or k in current)
            registry.update((k, v) for k, v in current.items() if k not in original)

    return restore
