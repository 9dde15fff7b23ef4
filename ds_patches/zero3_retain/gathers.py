"""When the modules of a ZeRO-3 model are gathered and released in a backward.

DeepSpeed counts in the *forward* how often a module's parameters will be needed, and the first
backward uses the counts up. Here the counts belong to the graph task: each run of the autograd
engine opens the module calls that it reaches, and closes them when the gradients of their inputs
are computed. So a second run over a graph gathers and releases as the first did, whether the graph
was retained or not. A module that is open when the backward ends (a first layer, whose input needs
no gradient) is released then.

DeepSpeed's prefetch trace keeps a parameter gathered if it is used again soon. Once the trace
includes a second backward, that would be every parameter, from one backward to the next. So an
engine with several backwards partitions its parameters at the end of each one, except persistent
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import (
    NO_TASK,
    at_end_of_task,
    current_node,
    current_task_id,
    is_recomputing,
)
from ds_patches.steps.state import Listener
from ds_patches.upstream import zero3_gathers

from .edges import Edge, NoEdge
from .saved import BlockParams


class _Call:
    """One forward call of a module.

    inputs: the number of its inputs that need a gradient.
    recomputed_in: the graph task that recomputes the call, or `NO_TASK`.
    version: the parameters' version in the call, as in `Gathers`.
    """

    __slots__ = ("has_output", "inputs", "recomputed_in", "remaining", "task_id", "version")

    def __init__(self, recomputed_in: int, version: int) -> None:
        self.recomputed_in, self.version = recomputed_in, version
        self.inputs = 0
        self.has_output = False  # if True, the next input begins another call
        self.task_id: int | None = None  # the graph task in which the call is open
        self.remaining = 0


@dataclass(eq=False)
class _Block:
    """A ``GatheredParameters`` in a node that recomputes, and then runs a backward of its own.

    node: the node, in the graph task `task_id`. exit: partitions the parameters.
    """

    params: Sequence[Any]
    exit: Callable[[], None]
    task_id: int
    node: Any


class Gathers(Listener):
    """The modules of one ``DeepSpeedZeRoOffload``, and their calls that backwards have open.

    version: returns a number that changes with each step that changes the parameters.
    """

    def __init__(self, offload: Any, version: Callable[[], int]) -> None:
        self.offload, self.version = offload, version
        self.block_params = BlockParams(version)
        #: True if a forward with a graph has run since the last backward began, of the engine or of
        #: its module. The first may have run before the patch was applied.
        self.forward_ran = True
        #: True after `remove`: graphs with our edges then have one backward each, as on stock.
        self.is_unapplied = False
        self._has_second_backward = False  # over one forward
        self._leaves: list[torch.nn.Module] = []
        self._leaf_inputs: dict[torch.nn.Module, int] = {}
        self._stock_functions: dict[torch.nn.Module, zero3_gathers.Functions] = {}
        self._modules: dict[torch.nn.Module, GatheredModule] = {}
        self._deferred: list[Callable[[], None]] = []
        self._open_calls: dict[int, dict[_Call, GatheredModule]] = {}  # by graph task id
        self._blocks: list[_Block] = []
        # Autograd runs nodes of the CPU and of each device on different threads.
        self._lock = Lock()

    def install(self) -> None:
        """Replace DeepSpeed's Functions at every registered module."""
        for module in zero3_gathers.registered_modules(self.offload):
            self.install_at(module)

    def install_at(self, module: torch.nn.Module) -> None:
        """Replace DeepSpeed's Functions at one module, unless they are replaced."""
        if module in self._stock_functions:
            return
        if zero3_gathers.is_leaf(module):
            self._leaves.append(module)
        self._stock_functions[module] = stock = zero3_gathers.module_functions(module)
        functions: zero3_gathers.Functions = NoEdge, NoEdge
        if not zero3_gathers.never_has_params(module):
            transforms = zero3_gathers.supports_transforms(stock)
            gathered = self._modules[module] = GatheredModule(self, module, transforms)
            functions = gathered.at_outputs, gathered.at_inputs
        zero3_gathers.set_module_functions(module, functions)

    def remove(self) -> None:
        """Restore DeepSpeed's Functions; graphs built meanwhile keep their edges."""
        self.is_unapplied = True
        for module, stock in self._stock_functions.items():
            zero3_gathers.set_module_functions(module, stock)
        zero3_gathers.release_hold(self.offload.module.parameters())

    def post_recompute(self, module: torch.nn.Module, reshard: Callable[[], None]) -> None:
        """Reshard a module that a checkpoint recomputed, after the checkpoint has compared shapes.

        ``checkpoint()`` keeps no copy of a frozen parameter, and compares its shape when all
        modules have run. Then the backward reaches the next module.
        """
        gathered = self._modules.get(module)
        if gathered is None or not zero3_gathers.any_frozen(module):
            reshard()
        elif not gathered.open_calls:  # else the running backward of the module releases it
            with self._lock:
                self._deferred.append(reshard)

    def exit_after_node(self, params: Sequence[Any], exit_block: Callable[[], None]) -> None:
        """Partition the parameters of a block after the node that is running."""
        block = _Block(params, exit_block, current_task_id(), current_node())
        self._blocks.append(block)
        at_end_of_task(lambda: self._exit_blocks([block]))

    def exit_blocks_before(self, params: Sequence[Any] = ()) -> None:
        """Exit the blocks of nodes that have run, and those whose parameters a block gathers again.

        A backward that is nested in a node has another graph task.
        """
        task_id, node, again = current_task_id(), current_node(), set(map(id, params))
        self._exit_blocks(
            [
                block
                for block in self._blocks
                if (block.task_id == task_id and block.node is not node)
                or not again.isdisjoint(map(id, block.params))
            ]
        )

    def _exit_blocks(self, blocks: list[_Block]) -> None:
        for block in blocks:
            if block in self._blocks:
                self._blocks.remove(block)
                block.exit()

    # --- Called by `accumulation` at the engine's backwards ---------------------------------------

    def backward_begins(self, same_forward: bool) -> None:
        """Prepare DeepSpeed's counts and prefetch queue for a second backward over a forward."""
        same_forward &= not self.forward_ran  # only our edges see a forward of ``engine.module``
        self.forward_ran = False
        if same_forward:
            self._has_second_backward = True
            zero3_gathers.restore_leaf_inputs(self._leaf_inputs)
            zero3_gathers.rewind_prefetch(self.offload)
        else:
            self._leaf_inputs = zero3_gathers.leaf_inputs(self._leaves)

    def wrap_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, with the parameters of scripts' blocks gathered for it if there are any."""
        return partial(self.block_params.backward, run) if self.block_params else run

    def backward_raised(self) -> None:
        """Drop the open calls without resharding: `accumulation` partitions all parameters."""
        self._exit_blocks([*self._blocks])
        with self._lock:
            self._deferred = []
            for calls in self._open_calls.values():
                for module in calls.values():
                    module.open_calls = 0
            self._open_calls.clear()

    # --- Module calls -----------------------------------------------------------------------------

    def open_call(self, call: _Call, module: GatheredModule) -> None:
        """Open a module call in the current graph task."""
        if self._blocks:
            self.exit_blocks_before()
        if self._deferred:
            self._run_deferred()
        task_id = current_task_id()
        with self._lock:
            if is_first := task_id not in self._open_calls:
                self._open_calls[task_id] = {}
            if call not in self._open_calls[task_id]:
                self._open_calls[task_id][call] = module
                module.open_calls += 1
                # A call that is opened twice in one task (an output depends on no input) stays open
                # until the task ends.
                call.remaining = call.inputs if call.task_id != task_id else 0
                call.task_id = task_id
        if is_first:
            at_end_of_task(partial(self._post_backward_final, task_id))

    def close_call(self, call: _Call, module: GatheredModule) -> None:
        """Close a module call, and reshard the module after its last open call."""
        if self._deferred:
            self._run_deferred()
        with self._lock:
            calls = self._open_calls.get(current_task_id(), {})
            is_last = calls.pop(call, None) is not None and module.count_closed_call()
        if is_last:
            module.reshard()

    def _post_backward_final(self, task_id: int) -> None:
        """Close the calls that a graph task left open, in the order in which they were opened.

        Their inputs need no gradient (a first layer), or the loss depends on some of their outputs
        only.
        """
        self._run_deferred()
        with self._lock:
            calls = self._open_calls.pop(task_id, {})
            closed = [module for module in calls.values() if module.count_closed_call()]
        for module in closed:
            module.reshard()
        # With calls open it is nested in another backward, as in reentrant checkpointing.
        if self._has_second_backward and not any(self._open_calls.values()):
            zero3_gathers.release_all(self.offload)

    def _run_deferred(self) -> None:
        with self._lock:
            deferred, self._deferred = self._deferred, []
        for reshard in deferred:
            reshard()


class GatheredModule:
    """A module with an edge at each side: unsharded before its backward, resharded after it.

    It is resharded when its last open call closes, so two interleaved calls of one module (a shared
    layer on parallel branches) never release each other's parameters.
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

    def count_closed_call(self) -> bool:
        """Count one open call fewer; return True if it was the last."""
        self.open_calls -= 1
        return self.open_calls == 0

    def _call_of_input(self, value: torch.Tensor) -> _Call:
        # Recomputation may stop within a call, whose outputs then never appear.
        task_id, version = current_task_id(), self._gathers.version()
        call = self._call
        if call.has_output or call.recomputed_in != task_id or call.version != version:
            call = self._call = _Call(task_id, version)
        call.inputs += value.requires_grad
        return call

    def _call_of_output(self, value: torch.Tensor) -> _Call:
        gathers = self._gathers
        # With keyword arguments alone a call begins with an output: DeepSpeed wraps no inputs.
        if self._call.version != gathers.version():
            self._call = _Call(current_task_id(), gathers.version())
        self._call.has_output = True
        if value.requires_grad and not gathers.forward_ran:
            gathers.forward_ran = current_task_id() == NO_TASK
        if self.open_calls and current_task_id() != NO_TASK and is_recomputing():
            # Recomputed to its end within its own backward: DeepSpeed has just released it.
            self.unshard()
        return self._call

    def _pre_backward(self, call: _Call, grad: Any) -> Any:
        gathers = self._gathers
        if call.version != gathers.version():
            raise Refused(
                "backward over a forward from before engine.step(): its activations belong to "
                "parameters that the step has overwritten. Run the forward again."
            )
        if gathers.is_unapplied and call.task_id not in (None, current_task_id()):
            raise Refused(
                "a second backward over a forward of ZeRO-3, after zero3_retain was unapplied: "
                "DeepSpeed gathers for one only. Run the forward again."
            )
        gathers.open_call(call, self)
        # Once per output, as DeepSpeed does, whose prefetch trace records the order of fetches.
        self.unshard()
        # With create_graph=True, the graph of this backward has a backward that ends here.
        function: Any = self.at_inputs if torch.is_grad_enabled() else NoEdge
        return function.apply(grad)

    def _post_backward(self, call: _Call, grad: Any) -> Any:
        function: Any = self.at_outputs if torch.is_grad_enabled() else NoEdge
        grad = function.apply(grad)
        if call.task_id == current_task_id():  # else no output took part, and nothing was gathered
            call.remaining -= 1
            if call.remaining == 0:
                self._gathers.close_call(call, self)
        return grad
