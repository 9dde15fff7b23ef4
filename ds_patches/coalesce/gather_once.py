"""Stage 3: a block that gathers each parameter once, and keeps it until the block ends.

The first forward and backward run by DeepSpeed's module hooks, which gather what they come to:
never more than without us. Then the rest is gathered and the hooks are taken away, so that what
follows runs as in a plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.graph_task import (
    NO_TASK,
    at_end_of_task,
    current_task_id,
    with_graphs,
)
from ds_patches.steps.step import EngineSteps, Listener
from ds_patches.upstream import zero3_gathers as gathers

_OLD_FORWARD = (
    "backward over a forward that ran in a coalesce_grad_reduction() block before engine.step(): "
    "the parameters that it belongs to are gone. Run the forward again."
)


class GatherOnce(Listener):
    """The gathers of one engine, from the begin of a block to its end."""

    def __init__(self, engine: Any, steps: EngineSteps) -> None:
        self._engine, self._steps = engine, steps
        self._offload = engine.optimizer.parameter_offload
        self._held: list[Layer] = []
        self._restore: Callable[[], None] | None = None  # the module hooks, once they are away
        self._handles: list[Any] = []
        self._is_over = False
        self._late_task = NO_TASK  # a backward after the block, over a forward in it

    def begin(self) -> None:
        """Release nothing from here on."""
        # Also a backward over a forward from before the block would.
        self._held = gathers.hold(self._offload)
        self._steps.listeners.append(self)

    def end(self) -> None:
        """Put the hooks back, and hold nothing any more; what is gathered stays so."""
        self._is_over = True
        if self in self._steps.listeners:
            self._steps.listeners.remove(self)
        for handle in self._handles:
            handle.remove()
        if self._restore is not None:
            self._restore()
        for layer in self._held:
            layer.remove()

    def release(self) -> None:
        """Partition what the block had gathered."""
        gathers.release(self._offload)

    # --- What `accumulation` tells of the engine's backwards --------------------------------------

    def backward_begins(self, again: bool) -> None:
        if self._restore is not None:
            gathers.gather(self._offload)  # if somebody has partitioned it since the forward
        elif not self._handles:
            self._handles = [self._engine.register_forward_pre_hook(self._gather_the_rest)]

    def backward_nested(self) -> None:
        self.backward_begins(False)

    def _gather_the_rest(self, *_: Any) -> None:
        """Gather what is not, and take the hooks away. A collective."""
        if self._restore is not None:
            return
        offload = self._offload
        gathers.gather(offload)
        self._restore = suspend([*offload.forward_hooks, *offload.backward_hooks])
        self._held.append(gathers.keep_trace(offload))
        # Whoever partitions, to save a checkpoint say, finds nobody else who gathers again.
        again = offload.module.register_forward_pre_hook(lambda *_: gathers.gather(offload))
        self._handles += [again, offload.module.register_forward_hook(self._keep_outputs)]

    def _keep_outputs(self, module: Any, inputs: Any, outputs: Any) -> None:
        """No hook gathers for the backward over this forward, which may come after the block."""
        begins = partial(self._gather_late, self._steps.steps_taken)
        for tensor in chain(*with_graphs(outputs)):
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]

    def _gather_late(self, step: int, gradient: Any) -> None:
        if not self._is_over or self._late_task == current_task_id():
            return
        if step != self._steps.steps_taken:
            raise Refused(_OLD_FORWARD)
        self._late_task = current_task_id()
        gathers.gather(self._offload)
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
