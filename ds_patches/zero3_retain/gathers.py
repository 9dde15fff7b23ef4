"""When the modules of a ZeRO-3 model are gathered in a backward, and until when.

Stock ZeRO-3 counts how often a module's parameters will be needed while the *forward* runs, and the
first backward spends the counts. Here the counts belong to the graph task: each run of the autograd
engine opens the calls it passes through, and closes them when their inputs' gradients are done. So
the second run over one graph gathers and releases just as the first did; whether the graph was
retained is not asked. A module that is still open when the backward ends (a first layer: its input
needs no gradient) is released there.

Upstream's prefetch trace keeps a parameter gathered if it is used again soon. Once it has learned
that a second backward follows, that would be every parameter, all the time between the two. So an
engine that retains graphs partitions them at the end of each backward: it holds its partitions,
and what must persist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import (
    NO_TASK,
    at_end_of_task,
    current_task_id,
    recomputes_for_hooks,
)
from ds_patches.steps.listener import Listener
from ds_patches.upstream import zero3_gathers

from .edges import Edge, NoEdge
from .saved import Used


class _Call:
    """One forward call of a module: how many of its inputs lead a gradient on.

    made_in: the graph task that recomputes it, or none.
    version: of the parameters, as `Gathers` is told.
    """

    __slots__ = ("inputs", "made_in", "remaining", "sealed", "task_id", "version")

    def __init__(self, made_in: int, version: int) -> None:
        self.made_in, self.version = made_in, version
        self.inputs = 0
        self.sealed = False  # an output was seen: the next input begins another call
        self.task_id: int | None = None  # the graph task in which the call is open
        self.remaining = 0


class Gathers(Listener):
    """The modules of one ``DeepSpeedZeRoOffload``, and their calls that backwards have open.

    version: of the parameters; it moves with each step that changes them.
    """

    def __init__(self, offload: Any, version: Callable[[], int]) -> None:
        self.offload, self.version = offload, version
        self.used = Used(version)
        #: A forward with a graph has run since the last backward began, by the engine or past it.
        #: The first may have run before we came.
        self.forward_ran = True
        #: The patch was taken back, and graphs have edges of ours: one backward each, as on stock.
        self.taken_back = False
        self._retains = False  # a second backward over one forward was seen
        self._leaves: list[torch.nn.Module] = []
        self._leaf_inputs: dict[torch.nn.Module, int] = {}
        self._stock: dict[torch.nn.Module, zero3_gathers.Functions] = {}
        self._modules: dict[torch.nn.Module, GatheredModule] = {}
        self._deferred: list[Callable[[], None]] = []
        self._open: dict[int, dict[_Call, GatheredModule]] = {}  # by graph task
        # Autograd runs hooks of CPU and device nodes on different threads.
        self._lock = Lock()

    def install(self) -> None:
        """Replace DeepSpeed's Functions at every registered module."""
        for module in zero3_gathers.registered_modules(self.offload):
            self.install_at(module)

    def install_at(self, module: torch.nn.Module) -> None:
        """Replace DeepSpeed's Functions at one module, unless it has ours."""
        if module in self._stock:
            return
        if zero3_gathers.is_leaf(module):
            self._leaves.append(module)
        self._stock[module] = stock = zero3_gathers.module_functions(module)
        ours: zero3_gathers.Functions = NoEdge, NoEdge
        if not zero3_gathers.never_has_params(module):
            transforms = zero3_gathers.supports_transforms(stock)
            gathered = self._modules[module] = GatheredModule(self, module, transforms)
            ours = gathered.at_outputs, gathered.at_inputs
        zero3_gathers.set_module_functions(module, ours)

    def remove(self) -> None:
        """Put DeepSpeed's Functions back; graphs built meanwhile keep our edges."""
        self.taken_back = True
        for module, stock in self._stock.items():
            zero3_gathers.set_module_functions(module, stock)
        zero3_gathers.release_hold(self.offload.module.parameters())
        self._stock.clear()
        self._modules.clear()
        self._leaves.clear()

    def post_recompute(self, module: torch.nn.Module, reshard: Callable[[], None]) -> None:
        """Reshard a module that ran in a backward, for what checkpoint() did not save.

        Of a frozen parameter checkpoint() keeps no copy but the parameter itself, and looks at its
        shape when all has run. Then the backward comes to the next module, which gathers its own.
        """
        gathered = self._modules.get(module)
        if gathered is None or not zero3_gathers.any_frozen(module):
            reshard()
        elif not gathered.open_calls:  # else the backward is in the module, and releases it
            with self._lock:
                self._deferred.append(reshard)

    # --- What `accumulation` tells of the engine's backwards --------------------------------------

    def backward_begins(self, again: bool) -> None:
        again &= not self.forward_ran  # that of ``engine.module`` is seen here alone
        self.forward_ran = False
        if again:
            self._retains = True
            zero3_gathers.restore_leaf_inputs(self._leaf_inputs)
            zero3_gathers.rewind_prefetch(self.offload)
        else:
            self._leaf_inputs = zero3_gathers.leaf_inputs(self._leaves)

    def backward_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.used.backward, run) if self.used else run

    def backward_raised(self) -> None:
        """Forget the open calls without resharding: `accumulation` partitions all parameters."""
        with self._lock:
            self._deferred = []
            for calls in self._open.values():
                for module in calls.values():
                    module.open_calls = 0
            self._open.clear()

    # --- Calls ------------------------------------------------------------------------------------

    def open(self, call: _Call, module: GatheredModule) -> None:
        if self._deferred:
            self._run_deferred()
        task_id = current_task_id()
        with self._lock:
            if begins := task_id not in self._open:
                self._open[task_id] = {}
            if call not in self._open[task_id]:
                self._open[task_id][call] = module
                module.open_calls += 1
                # A call seen again in the same task (an output that no input depends on) stays
                # open until the task ends.
                call.remaining = call.inputs if call.task_id != task_id else 0
                call.task_id = task_id
        if begins:
            at_end_of_task(partial(self._post_backward_final, task_id))

    def close(self, call: _Call, module: GatheredModule) -> None:
        if self._deferred:
            self._run_deferred()
        with self._lock:
            calls = self._open.get(current_task_id(), {})
            is_last = calls.pop(call, None) is not None and module.leave()
        if is_last:
            module.reshard()

    def _post_backward_final(self, task_id: int) -> None:
        """Close the calls that a graph task left open, in the order in which they were opened.

        Those whose inputs need no gradient (a first layer), or whose loss reaches some of them.
        """
        self._run_deferred()
        with self._lock:
            calls = self._open.pop(task_id, {})
            last = [module for module in calls.values() if module.leave()]
        for module in last:
            module.reshard()
        if self._retains and not any(
            self._open.values()
        ):  # else nested, as reentrant checkpointing is
            zero3_gathers.release_all(self.offload)

    def _run_deferred(self) -> None:
        with self._lock:
            deferred, self._deferred = self._deferred, []
        for reshard in deferred:
            reshard()


class GatheredModule:
    """Both edges of one module: unsharded before its backward, resharded after it.

    It is resharded when its last open call closes, so two interleaved calls of one module (a shared
    layer on parallel branches) never lose their parameters to each other.
    """

    def __init__(self, gathers: Gathers, module: torch.nn.Module, transforms: bool) -> None:
        self._gathers, self._module = gathers, module
        #: Releases the module's parameters.
        self.reshard = partial(zero3_gathers.release_module, gathers.offload, module)
        self.open_calls = 0
        self._call = _Call(NO_TASK, gathers.version())
        self.at_outputs = Edge(self._call_of_output, self._pre_backward, transforms)
        self.at_inputs = Edge(self._call_of_input, self._post_backward, transforms)

    def unshard(self) -> None:
        """All-gather the module's parameters. Collective."""
        self._gathers.offload.pre_sub_module_backward_function(self._module)

    def leave(self) -> bool:
        """Count one open call fewer; return True if it was the last."""
        self.open_calls -= 1
        return self.open_calls == 0

    def _call_of_input(self, value: torch.Tensor) -> _Call:
        # Recomputation stops in the midst of a call, whose outputs are never seen.
        task_id, version = current_task_id(), self._gathers.version()
        call = self._call
        if call.sealed or call.made_in != task_id or call.version != version:
            call = self._call = _Call(task_id, version)
        call.inputs += value.requires_grad
        return call

    def _call_of_output(self, value: torch.Tensor) -> _Call:
        gathers = self._gathers
        # A call begins with an output where all arguments have names: upstream sees none of them.
        if self._call.version != gathers.version():
            self._call = _Call(current_task_id(), gathers.version())
        self._call.sealed = True
        if value.requires_grad and not gathers.forward_ran:
            gathers.forward_ran = current_task_id() == NO_TASK
        if self.open_calls and current_task_id() != NO_TASK and recomputes_for_hooks():
            # Recomputed to its end in the midst of its backward: upstream has just released it.
            self.unshard()
        return self._call

    def _pre_backward(self, call: _Call, grad: Any) -> Any:
        gathers = self._gathers
        if call.version != gathers.version():
            raise Refused(
                "backward over a forward from before engine.step(): its activations belong to the "
                "old parameters, and the old parameters are gone. Run the forward again."
            )
        if gathers.taken_back and call.task_id not in (None, current_task_id()):
            raise Refused(
                "a second backward over a forward of ZeRO-3, after zero3_retain was taken back"
            )
        gathers.open(call, self)
        # Once per output, as stock does: the order of fetches is what its prefetch trace learns.
        self.unshard()
        # A graph of this backward begins here, and has a backward of its own that ends here.
        function: Any = self.at_inputs if torch.is_grad_enabled() else NoEdge
        return function.apply(grad)

    def _post_backward(self, call: _Call, grad: Any) -> Any:
        function: Any = self.at_outputs if torch.is_grad_enabled() else NoEdge
        grad = function.apply(grad)
        if call.task_id == current_task_id():  # else no output took part: nothing was gathered
            call.remaining -= 1
            if call.remaining == 0:
                self._gathers.close(call, self)
        return grad
