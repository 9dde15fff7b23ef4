"""Which parameters of a ZeRO-3 model are gathered, and until when.

One backward gathers a module, runs through it and releases it; whether the graph was retained is
not asked, since the next backward gathers again. A module that is still open when the backward
ends (a first layer: its input needs no gradient) is released there.

Upstream's prefetch trace keeps a parameter gathered if it is used again soon. Once it has learned
that a second backward follows, that would be every parameter, all the time between the two. So an
engine that retains graphs partitions them at the end of each backward: it holds its partitions,
what must persist, and at most one prefetch bucket in flight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .boundaries import ModuleBoundary, NoBoundary, OpenCalls
from .graph_task import at_end_of_task
from .upstream import parameters

_MISSING = object()
#: A module's attributes for the Functions at its outputs and at its inputs.
_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


class Residency:
    """The boundaries set around the modules of one ``DeepSpeedZeRoOffload``."""

    def __init__(self, offload: Any) -> None:
        self._offload = offload
        self._calls = OpenCalls(self._task_begins)
        self._retains = False  # a second backward over one forward was seen
        self._leaves: list[torch.nn.Module] = []
        self._leaf_inputs: dict[torch.nn.Module, int] = {}
        self._stock: dict[torch.nn.Module, tuple[Any, ...]] = {}  # what stood at _FUNCTIONS

    def install(self) -> None:
        """Put our boundary at every registered module that has none yet."""
        for module in parameters.registered_modules(self._offload):
            self.install_at(module)

    def install_at(self, module: torch.nn.Module) -> None:
        """Put our boundary at one module, unless it has one."""
        if module in self._stock:
            return
        if parameters.is_leaf(module):
            self._leaves.append(module)
        self._stock[module] = tuple(vars(module).get(name, _MISSING) for name in _FUNCTIONS)
        # Upstream's forward hooks look both up at every call and keep what they find.
        for name, function in zip(_FUNCTIONS, self._functions_for(module), strict=True):
            setattr(module, name, function)

    def _functions_for(self, module: torch.nn.Module) -> tuple[Any, Any]:
        if parameters.holds_none(module):
            return NoBoundary, NoBoundary
        boundary = ModuleBoundary(
            gather=partial(self._gather, module),
            release=partial(self._release, module),
            calls=self._calls,
        )
        return boundary.before, boundary.after

    def remove(self) -> None:
        """Put back what stood at each module; graphs built meanwhile keep our boundaries."""
        for module, stock in self._stock.items():
            for name, value in zip(_FUNCTIONS, stock, strict=True):
                if value is _MISSING:
                    delattr(module, name)
                else:
                    setattr(module, name, value)
        self._stock.clear()
        self._leaves.clear()

    def begin_backward(self) -> None:
        """Before the first backward over a forward."""
        self._leaf_inputs = parameters.leaf_inputs(self._leaves)

    def begin_backward_again(self) -> None:
        """Before the second and later backward over one forward."""
        self._retains = True
        parameters.restore_leaf_inputs(self._leaf_inputs)
        parameters.rewind_prefetch(self._offload.get_param_coordinator())

    def abandon_backward(self) -> None:
        """A backward raised: forget its open calls and partition whatever it left gathered."""
        self._calls.abandon()
        self._offload.get_param_coordinator().release_and_reset_all(self._offload.module)

    def _gather(self, module: torch.nn.Module) -> None:
        self._offload.pre_sub_module_backward_function(module)

    def _release(self, module: torch.nn.Module) -> None:
        if parameters.holds_backward_fetch(self._offload.get_param_coordinator(), module):
            self._offload.post_sub_module_backward_function(module)

    def _task_begins(self, task_id: int) -> None:
        at_end_of_task(partial(self._task_ends, task_id))

    def _task_ends(self, task_id: int) -> None:
        self._calls.end(task_id)
        if self._calls or not self._retains:
            return  # calls open elsewhere: this task was nested (reentrant checkpointing)
        coordinator = self._offload.get_param_coordinator()
        for param in parameters.releasable_parameters(self._offload):
            parameters.release_parameter(coordinator, param)
