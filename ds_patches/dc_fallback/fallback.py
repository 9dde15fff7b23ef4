"""One engine under DeepCompile: its frames that run eagerly gather, and train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core import agreement
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import OtherRankFailed
from ds_patches.core.layer import Layer
from ds_patches.steps import ranks
from ds_patches.steps.state import Step, StepState
from ds_patches.upstream import deepcompile, zero3
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.deepcompile import Graphs, before_backward

from . import dynamo, modules
from .reduction import Reduction
from .uses import Uses

logger = logging.getLogger("ds_patches.dc_fallback")


class Phase(Enum):
    """What an engine is doing. `docs/patches/dc_fallback.md` has what each event does in each."""

    IDLE = auto()
    FORWARD = auto()
    #: From its prologue to its epilogue. After one that raised, until the next forward.
    BACKWARD = auto()
    #: After a backward that raised, and not on every rank.
    ALONE = auto()


class Fallback:
    """Gathers what eager frames read, and adds their gradients to what the optimizer steps with.

    The engine's compiled graphs run by way of `run_graph`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        trained = [p for group in self._optimizer.fp16_groups for p in group if p.requires_grad]
        self._graphs = Graphs(trained, zero3.partitioned_params(engine.module), engine.device)
        self._reduction = Reduction(
            attrgetter("ds_process_group"),
            lambda grad: self._optimizer.communication_data_type or grad.dtype,
            self._receive,
        )
        self.uses = Uses(
            lambda params: [zero3.full_value(param) for param in params],
            self._gradient_arrives,
            attrgetter("ds_shape"),
            zero3.is_available,
            [zero3.partitioned_params(leaf) for leaf in deepcompile.leaf_modules(engine)],
        )
        #: By ds_id, gradients to be added when the backward's graphs have ended.
        self._aside: dict[int, torch.Tensor] = {}
        #: The ds_ids whose partitions hold this step's gradients; its first backward resets it.
        self._written: set[int] = set()
        self._step = Step()
        self._told: set[torch.nn.Parameter] = set()
        self._looked_at: set[int] = set()  # graphs, for hooks that they do not run
        self._phase = self._outer = Phase.IDLE  # now, and before the backward
        self._records = False  # whether the last forward had gradients enabled
        self._saving = dynamo.SavedTensorsHooks(
            dynamo.disabled(self.uses.pack), dynamo.disabled(self.uses.unpack)
        )
        self._saves = True  # whether a forward has had eager frames; unknown before the first
        self._undo = ExitStack()
        self._install()

    # --- what the engine's modules do -------------------------------------------------------------

    def _install(self) -> None:
        self._undo.callback(deepcompile.disable_native_fallback(self._engine))
        deepcompile.keep_shapes_static(self._engine)
        deepcompile.remove_leaf_hooks(self._engine)
        getter = torch.nn.Module.__getattr__
        dynamo.leave_alone(getter)  # or it is compiled, and gathers nothing
        self._undo.callback(dynamo.look_again, getter)

        def again(launch: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
            launch(*args, **kwargs)
            dynamo.leave_alone(getter)
            self._graphs.refresh()

        # DeepCompile's look for new passes resets Dynamo.
        for owner, name, around in (
            (self._engine, "launch_compile_passes", again),
            (self._engine, "forward", self._forward),
            (self._engine, "_backward_prologue", self._pre_backward),
            (self._engine, "_backward_epilogue", self._post_backward),
            (self._engine, "zero_grad", self._zero_grad),
            (self._optimizer, "zero_grad", self._zero_grad),
            (self._optimizer, "step", self._take_step),
        ):
            self._undo.callback(Layer(owner, name, around).remove)
        before_call, after_call = modules.call_hooks(self._engine, self.uses)
        see = dynamo.disabled(self._see)
        for module in self._engine.module.modules():
            for handle in (
                module.register_forward_pre_hook(before_call),
                module.register_forward_hook(after_call, always_call=True),
            ):
                self._undo.callback(handle.remove)
            self._undo.callback(modules.watch(module, see))

    def remove(self) -> None:
        """Leave the engine as DeepCompile made it."""
        try:
            if self._phase is not Phase.ALONE:
                self._recover()
            if self._step.state is not StepState.HELD:
                # Graphs go on adding until a backward at the boundary has ended.
                zero3.zero_all_gradients(self._optimizer)
        finally:
            self._undo.close()

    def _see(self, param: Any) -> Any:
        if not zero3.is_partitioned(param):
            return param
        if not self.uses.calls:
            if not (self._phase is Phase.BACKWARD and torch.is_grad_enabled()):
                return param
            self.uses.recompute()
        seen = self.uses.cached(param)
        if seen is None and not dynamo.is_compiling_a_frame():
            seen = self.uses.use(param)
        return param if seen is None else seen

    # --- a step -----------------------------------------------------------------------------------

    def _forward(self, forward: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        calls = self.uses.calls
        outermost = self._phase is not Phase.FORWARD
        if outermost:
            self._records = torch.is_grad_enabled()
            self.uses.close(calls.cut(0))  # of modules called by themselves, which raised
            self._recover()
            zero3.release_persistent(self._optimizer)
        depth = len(calls)
        calls.open(None)
        saves = self._saves and self._records and outermost
        self._phase = Phase.FORWARD
        try:
            with self._saving if saves else nullcontext():
                result = forward(*args, **kwargs)
        finally:
            self.uses.close(calls.cut(depth))
            if outermost and self._phase is Phase.FORWARD:
                self._phase = Phase.IDLE
        if self._records and outermost:
            self._saves = self.uses.gathered_any
        return result

    def run_graph(self, graph_id: int, graph: Callable[..., Any], inputs: Any) -> Any:
        """Run a compiled graph, in a forward or for a recomputation in the backward."""
        outputs = self._saving.run_without(graph, inputs)
        if self._records and (ids := self._graphs.params_written_by(graph_id)):
            before_backward(inputs, outputs, partial(self._graph_begins, graph_id))
            params = () if graph_id in self._looked_at else self._engine.module.parameters()
            self._looked_at.add(graph_id)
            for param in params:
                hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
                if hooks and param.ds_id in ids:
                    self._tell_of_hook(param)
        return outputs

    def _graph_begins(self, graph_id: int) -> None:
        """The backward of a graph begins: set aside what it may write over."""
        partitions = zero3.gradient_partitions(self._optimizer)
        for ds_id in self._graphs.begin_graph_backward(graph_id, self._written):
            if ds_id in partitions and partitions[ds_id].numel():
                self._add_aside(ds_id, partitions[ds_id], partitions[ds_id])
                partitions[ds_id].zero_()

    def _pre_backward(self, prologue: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Right after the engine's own prologue, which a second backward may come without."""
        prologue(*args, **kwargs)
        self._graphs.begin_backward(self._engine.is_gradient_accumulation_boundary())
        if self._phase in (Phase.BACKWARD, Phase.ALONE):
            return  # it has come to another forward
        self._outer, self._phase = self._phase, Phase.BACKWARD
        if self._step.state is StepState.HELD:
            self._written.update(zero3.gradient_partitions(self._optimizer))
        else:
            zero3.zero_all_gradients(self._optimizer)
            self._written.clear()
        self._step = self._step.after_backward(self._engine.micro_steps)

    def _post_backward(self, epilogue: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        self._reduction.finish()
        self.uses.forget_backward()
        self._hand_over()
        self._phase = self._outer
        epilogue(*args, **kwargs)

    def _zero_grad(self, zero_grad: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Drop what the step has, if a backward has come since ``engine.step()`` counted one."""
        zero_grad(*args, **kwargs)
        if self._step.has_backward_in(self._engine.micro_steps):
            self._aside.clear()
            self._step = Step()

    def _take_step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """The optimizer steps, or skips a step after an overflow."""
        self._reduction.finish()  # of a backward that had no epilogue
        if self._step.state is not StepState.HELD:
            zero3.zero_all_gradients(self._optimizer)
        self._hand_over()
        zero3.make_reduction_wait(self._optimizer)
        result = step(*args, **kwargs)
        self._graphs.after_step()
        self._step = Step()
        return result

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
        """Take this rank's part of a gradient; aside, if a graph may write to its partition."""
        target = zero3.gradient_partitions(self._optimizer)[param.ds_id]
        if self._graphs.has_param(param.ds_id):
            self._add_aside(param.ds_id, part, target)
        else:
            target.add_(part)

    def _add_aside(self, ds_id: int, part: torch.Tensor, like: torch.Tensor) -> None:
        if ds_id not in self._aside:
            self._aside[ds_id] = torch.zeros_like(like)
        self._aside[ds_id].add_(part)

    def _hand_over(self) -> None:
        for ds_id, part in self._aside.items():
            zero3.gradient_partitions(self._optimizer)[ds_id].add_(part)
        self._written.update(self._aside)
        self._aside.clear()

    def _recover(self) -> None:
        """Drop the step's gradients, if its last backward raised.

        Raises OtherRankFailed if it did not raise on all ranks.
        """
        self.uses.forget_backward()
        if self._phase not in (Phase.BACKWARD, Phase.ALONE):
            return
        # What graphs hold of the backward goes by collectives, in which all ranks take part.
        world, me = range(dist.get_world_size()), dist.get_rank()
        place = ranks.meeting("dc_fallback", world, me)
        absent = ranks.come(agreement.store(), place, world, me, ranks.patience())
        if absent:
            self._phase = Phase.ALONE
            raise OtherRankFailed(
                f"a backward raised here, and none on rank {', '.join(map(str, absent))}: what "
                "DeepCompile's graphs hold of it can be dropped on all ranks together only. Start "
                "the job again"
            )
        self._phase = Phase.IDLE
        logger.warning(
            "A backward raised: every gradient reduced since the last optimizer step was dropped."
        )
        self._reduction.abandon()
        self._aside.clear()
        upstream_engine.reset_backward(self._engine)
        self._graphs.after_step(failed=True)
        self._step = Step(StepState.FAILED)
