"""One engine under DeepCompile: its frames that run eagerly gather, and train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.errors import OtherRankFailed
from ds_patches.runtime import engines, ranks
from ds_patches.runtime.attributes import Shadow

from . import dynamo
from .reduction import Reduction
from .upstream import engine as upstream_engine
from .upstream import parameters, partition
from .upstream.graphs import Graphs, before_backward
from .uses import Call, Uses

#: Engines so far, in the order that is the same on all ranks.
_built = count()

logger = logging.getLogger("ds_patches.dc_fallback")

Hook = Callable[..., None]


class Fallback:
    """Gathers what eager frames read, and adds their gradients to what the optimizer steps with.

    The engine's compiled graphs run by way of `run_graph`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        trained = [p for group in self._optimizer.fp16_groups for p in group if p.requires_grad]
        self._graphs = Graphs(trained, partition.below(engine.module), engine.device)
        self._reduction = Reduction(
            partition.group_of,
            lambda grad: partition.dtype_to_send(self._optimizer, grad),
            self._receive,
        )
        self.uses = Uses(
            partition.gather,
            self._gradient_arrives,
            partition.shape_of,
            partition.is_here,
            [partition.below(leaf) for leaf in upstream_engine.leaves(engine)],
        )
        self._aside: dict[int, torch.Tensor] = {}  # to be added when the graphs have ended
        self._new_step = True
        self._micro_step = -1  # that of the last backward
        self._told: set[torch.nn.Parameter] = set()
        self._records, self._in_forward, self._in_backward = False, False, False
        self._saving = dynamo.SavedTensorsHooks(
            dynamo.disabled(self.uses.pack), dynamo.disabled(self.uses.unpack)
        )
        self._saves = True  # whether a forward has had eager frames; unknown before the first
        self._name = f"ds_patches/dc_fallback/{next(_built)}"
        self._failures, self._alone = 0, False
        self._undo = ExitStack()
        self._install()

    # --- what the engine's modules do -------------------------------------------------------------

    def _install(self) -> None:
        self._undo.callback(upstream_engine.disown(self._engine))
        upstream_engine.keep_shapes_static(self._engine)
        upstream_engine.drop_leaf_hooks(self._engine)
        getter = torch.nn.Module.__getattr__
        dynamo.leave_alone(getter)  # or it is compiled, and gathers nothing
        self._undo.callback(dynamo.look_again, getter)

        def again(launch: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            launch(*args, **kwargs)
            dynamo.leave_alone(getter)
            self._graphs.look_again()

        # DeepCompile's look for new passes resets Dynamo.
        for name, around in (
            ("launch_compile_passes", again),
            ("_backward_epilogue", self._end_backward),
        ):
            self._undo.callback(Shadow(self._engine, name, around).remove)
        before_call, after_call = self._call_hooks()
        see = dynamo.disabled(self._see)
        for module in self._engine.module.modules():
            for handle in (
                module.register_forward_pre_hook(before_call),
                module.register_forward_hook(after_call, always_call=True),
            ):
                self._undo.callback(handle.remove)
            self._undo.callback(parameters.watch(module, see))

    def _call_hooks(self) -> tuple[Hook, Hook]:
        """Hooks before and after each call of a module that eager code makes."""
        calls, root = self.uses.calls, self._engine.module
        begin = dynamo.disabled(calls.open)
        end = dynamo.disabled(self._end_call)
        compiles_within = upstream_engine.tells_layers_apart()
        leaves = set(upstream_engine.leaves(self._engine))

        def before_call(module: torch.nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            call = begin(module)
            # Ranks compile together, and what runs in a leaf differs by rank.
            if module in leaves or not (compiles_within or module is root):
                call.dynamo = dynamo.switch()

        def after_call(module: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            for call in reversed(end(module)):
                if call.dynamo is not None:
                    dynamo.switch(call.dynamo)

        for function in (before_call, after_call, dynamo.switch):
            dynamo.leave_alone(function)
        return before_call, after_call

    def _end_call(self, module: torch.nn.Module) -> Sequence[Call]:
        return self.uses.close(self.uses.calls.close(module))

    def remove(self) -> None:
        """Leave the engine as DeepCompile made it."""
        try:
            if not self._alone:
                self._recover()
            if self._new_step:
                # Graphs go on adding until a backward at the boundary has ended.
                partition.clear(self._optimizer)
        finally:
            self._undo.close()

    def _see(self, param: Any) -> Any:
        if not partition.is_partitioned(param):
            return param
        if not self.uses.calls:
            if not (self._in_backward and torch.is_grad_enabled()):
                return param
            self.uses.recompute()
        seen = self.uses.cached(param)
        if seen is None and not dynamo.is_compiling_a_frame():
            seen = self.uses.use(param)
        return param if seen is None else seen

    # --- a step -----------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        calls = self.uses.calls
        outermost = not self._in_forward
        if outermost:
            self._records = torch.is_grad_enabled()
            self.uses.close(calls.cut(0))  # of modules called by themselves, which raised
            self._recover()
            partition.release(self._optimizer)
        depth = len(calls)
        calls.open(None)
        saves = self._saves and self._records and outermost
        self._in_forward = True
        try:
            with self._saving if saves else nullcontext():
                yield
        finally:
            self.uses.close(calls.cut(depth))
            self._in_forward = not outermost
        if self._records and outermost:
            self._saves = self.uses.gathered_any

    def run_graph(self, graph_id: int, graph: Callable[..., Any], inputs: Any) -> Any:
        """Run a compiled graph, in a forward or for a recomputation in the backward."""
        outputs = self._saving.run_without(graph, inputs)
        if self._records and (ids := self._graphs.to_be_written(graph_id)):
            before_backward(inputs, outputs, partial(self._graph_writes, graph_id))
            for param in self._engine.module.parameters():
                hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
                if hooks and param.ds_id in ids:
                    self._tell_of_hook(param)
        return outputs

    def _graph_writes(self, graph_id: int) -> None:
        """The first backward of a graph begins: it writes where all others will add."""
        found = partition.partitions(self._optimizer)
        for ds_id in self._graphs.writes(graph_id):
            if ds_id in found and found[ds_id].numel():
                self._add_aside(ds_id, found[ds_id], found[ds_id])
                found[ds_id].zero_()

    def begin_backward(self) -> None:
        """Right after the engine's own prologue, which a second backward may come without."""
        self._graphs.add_up()
        if self._in_backward:
            return  # it has come to another forward
        self._in_backward = True
        if self._new_step:
            partition.clear(self._optimizer)
            self._new_step = False
        self._micro_step = self._engine.micro_steps

    def _end_backward(self, epilogue: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._reduction.finish()
        self.uses.forget_backward()
        self._hand_over()
        self._in_backward = False
        epilogue(*args, **kwargs)

    def zero_grad(self) -> None:
        """Drop what the step has, if a backward has come since ``engine.step()`` counted one."""
        if self._engine.micro_steps == self._micro_step:
            self._aside.clear()
            self._new_step = True

    def before_step(self) -> None:
        self._reduction.finish()  # of a backward that had no epilogue
        if self._new_step:
            partition.clear(self._optimizer)  # no backward since the last step, or zero_grad()
        self._hand_over()
        partition.order_step_behind(self._optimizer)

    def after_step(self, failed: bool = False) -> None:
        """The optimizer has stepped, or skipped a step after an overflow."""
        self._graphs.stepped(failed)
        self._new_step = True

    def _gradient_arrives(self, param: Any, grad: torch.Tensor) -> None:
        """The full gradient of a parameter, from eager frames."""
        for hook in [*(param._backward_hooks or {}).values()]:
            changed = hook(grad)
            grad = grad if changed is None else changed
        if getattr(param, "_post_accumulate_grad_hooks", None):
            self._tell_of_hook(param)
        self._reduction.add(param, grad)

    def _tell_of_hook(self, param: Any) -> None:
        if param not in self._told:
            self._told.add(param)
            (name,) = (n for n, p in self._engine.module.named_parameters() if p is param)
            logger.warning(
                "A hook of parameter %s is not run: DeepCompile's graphs run none, and skipped "
                "frames none of register_post_accumulate_grad_hook().",
                name,
            )

    def _receive(self, param: Any, part: torch.Tensor) -> None:
        """What a graph may be writing to, on a stream of its own, waits for the end."""
        target = partition.partitions(self._optimizer)[param.ds_id]
        if self._graphs.has(param.ds_id):
            self._add_aside(param.ds_id, part, target)
        else:
            target.add_(part)

    def _add_aside(self, ds_id: int, part: torch.Tensor, like: torch.Tensor) -> None:
        if ds_id not in self._aside:
            self._aside[ds_id] = torch.zeros_like(like)
        self._aside[ds_id].add_(part)

    def _hand_over(self) -> None:
        for ds_id, part in self._aside.items():
            partition.partitions(self._optimizer)[ds_id].add_(part)
        self._aside.clear()

    def _recover(self) -> None:
        """After a backward that raised: drop the gradients of the step that it was part of."""
        self.uses.forget_backward()
        if not self._in_backward:
            return
        self._meet_in_failure()
        self._in_backward = False
        logger.warning(
            "A backward raised: every gradient reduced since the last optimizer step was dropped."
        )
        self._reduction.abandon()
        self._aside.clear()
        engines.forget_backward(self._engine)
        self.after_step(failed=True)

    def _meet_in_failure(self) -> None:
        """What graphs hold of the backward goes by collectives, in which all ranks take part.

        Raises OtherRankFailed if some rank does not come.
        """
        world = range(dist.get_world_size())
        absent = ranks.come(f"{self._name}/{self._failures}", dist.get_rank(), world)
        self._alone = bool(absent)
        if absent:
            raise OtherRankFailed(
                f"a backward raised here, and none on rank {', '.join(map(str, absent))}: what "
                "DeepCompile's graphs hold of it can be dropped on all ranks together only. Start "
                "the job again"
            )
        self._failures += 1
