"""When the modules of a ZeRO-3 model are gathered in a backward, and until when.

One backward gathers a module, runs through it and releases it; whether the graph was retained is
not asked, since the next backward gathers again. A module that is still open when the backward
ends (a first layer: its input needs no gradient) is released there.

Upstream's prefetch trace keeps a parameter gathered if it is used again soon. Once it has learned
that a second backward follows, that would be every parameter, all the time between the two. So an
engine that retains graphs partitions them at the end of each backward: it holds its partitions,
and what must persist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ds_patches.steps.graph_task import at_end_of_task
from ds_patches.steps.step import Listener
from ds_patches.upstream import zero3_gathers
from ds_patches.upstream import zero3_modules as gathered

from .boundaries import ModuleBoundary, NoBoundary, OpenCalls
from .saved import Used


class Gathers(Listener):
    """The boundaries around the modules of one ``DeepSpeedZeRoOffload``.

    version: of the parameters; it moves with each step that changes them.
    """

    def __init__(self, offload: Any, version: Callable[[], int]) -> None:
        self._offload = offload
        self._version = version
        self.used = Used(version)
        self._calls = OpenCalls(lambda task_id: at_end_of_task(partial(self._task_ends, task_id)))
        self._retains = False  # a second backward over one forward was seen
        self._leaves: list[torch.nn.Module] = []
        self._leaf_inputs: dict[torch.nn.Module, int] = {}
        self._stock: dict[torch.nn.Module, gathered.Functions] = {}
        self._boundaries: dict[torch.nn.Module, ModuleBoundary] = {}

    def install(self) -> None:
        """Put our boundary at every registered module that has none yet."""
        for module in gathered.registered_modules(self._offload):
            self.install_at(module)

    def install_at(self, module: torch.nn.Module) -> None:
        """Put our boundary at one module, unless it has one."""
        if module in self._stock:
            return
        if gathered.is_leaf(module):
            self._leaves.append(module)
        self._stock[module] = gathered.functions_at(module)
        gathered.set_functions(module, self._functions_for(module))

    def _functions_for(self, module: torch.nn.Module) -> gathered.Functions:
        if gathered.holds_none(module):
            return NoBoundary, NoBoundary
        boundary = ModuleBoundary(
            gather=partial(gathered.gather, self._offload, module),
            release=partial(gathered.release, self._offload, module),
            calls=self._calls,
            version=self._version,
            transforms=gathered.lets_transforms_pass(self._stock[module]),
        )
        self._boundaries[module] = boundary
        return boundary.before, boundary.after

    def remove(self) -> None:
        """Put back what stood at each module; graphs built meanwhile keep our boundaries."""
        self._calls.taken_back = True
        for module, stock in self._stock.items():
            gathered.set_functions(module, stock)
        zero3_gathers.let_go(self._offload.module.parameters())
        self._stock.clear()
        self._boundaries.clear()
        self._leaves.clear()

    def hold(self, params: Iterable[Any]) -> None:
        """A script has gathered these, and modules may run meanwhile."""
        zero3_gathers.hold_in_block(self._offload, params)

    def recomputed(self, module: torch.nn.Module, release: Callable[[], None]) -> None:
        """A module ran in a backward, for what checkpoint() did not save; `release` its parameters.

        Of a frozen parameter checkpoint() keeps no copy but the parameter itself, and looks at its
        shape when all has run. Then the backward comes to the next module, which gathers its own.
        """
        if (boundary := self._boundaries.get(module)) is None or not gathered.any_frozen(module):
            release()
        elif not boundary.open_calls:  # else the backward is in the module, and releases it
            self._calls.defer(release)

    # --- What `accumulation` tells of the engine's backwards --------------------------------------

    def backward_begins(self, again: bool) -> None:
        again &= not self._calls.forward_ran  # that of ``engine.module`` is seen here alone
        self._calls.forward_ran = False
        if again:
            self._retains = True
            gathered.restore_leaf_inputs(self._leaf_inputs)
            gathered.rewind_prefetch(self._offload)
        else:
            self._leaf_inputs = gathered.leaf_inputs(self._leaves)

    def backward_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.used.backward, run) if self.used else run

    def backward_raised(self) -> None:
        """Forget its open calls; what it gathered is partitioned."""
        self._calls.abandon()

    def _task_ends(self, task_id: int) -> None:
        self._calls.end(task_id)
        if self._retains and not self._calls:  # else nested, as reentrant checkpointing is
            zero3_gathers.release(self._offload)
