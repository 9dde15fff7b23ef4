"""One engine under DeepCompile, whose frames that run eagerly gather and train."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.errors import OtherRankFailed
from ds_patches.core.layer import Layer
from ds_patches.steps import ranks
from ds_patches.steps.state import Step, StepState
from ds_patches.upstream import deepcompile, zero3
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.deepcompile import Graphs, before_backward
from ds_patches.upstream.zero3_gathers import is_leaf

from . import dynamo, modules
from .reduction import Reduction
from .uses import Uses

logger = logging.getLogger("ds_patches.dc_fallback")


class Phase(Enum):
    """The phase of an engine; `docs/patches/dc_fallback.md` has a table of phases and events."""

    IDLE = auto()
    FORWARD = auto()
    #: From a backward's prologue to its epilogue, or to the next forward if it raised.
    BACKWARD = auto()
    #: After a backward that raised, but not on every rank.
    ALONE = auto()


class Fallback:
    """Gathers the parameters that eager frames read, and adds their gradients to the step's.

    The engine's compiled graphs run through `run_graph`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        trained = [p for group in self._optimizer.fp16_groups for p in group if p.requires_grad]
        self._graphs = Graphs(trained, zero3.partitioned_params(engine.module), engine.device)
        self._reduction = Reduction(
            attrgetter("ds_process_group"),
            lambda grad: self._optimizer.communication_data_type or grad.dtype,
            self._receive_part,
        )
        self.uses = Uses(
            lambda params: [zero3.full_value(param) for param in params],
            self._reduce_gradient,
            attrgetter("ds_shape"),
            zero3.is_available,
            map(zero3.partitioned_params, filter(is_leaf, engine.module.modules())),
        )
        #: By ds_id, gradients to add to the partitions when the backward's graphs have ended.
        self._deferred: dict[int, torch.Tensor] = {}
        #: The ds_ids of partitions with gradients of this step; its first backward clears it.
        self._written: set[int] = set()
        self._step = Step()
        self._warned_params: set[torch.nn.Parameter] = set()
        self._checked_graphs: set[int] = set()  # graphs whose parameters were checked for hooks
        self._phase = self._outer_phase = Phase.IDLE  # now, and before the backward
        self._records_graph = False  # True if the last forward had gradients enabled
        self._saved_tensors_hooks = dynamo.SavedTensorsHooks(
            dynamo.disabled(self.uses.pack), dynamo.disabled(self.uses.unpack)
        )
        self._has_eager_frames = True  # in the last forward; assumed before the first
        self._exit_stack = ExitStack()
        self._install()

    # --- Installation, and reads of parameters ----------------------------------------------------

    def _install(self) -> None:
        self._exit_stack.callback(deepcompile.disable_native_fallback(self._engine))
        deepcompile.keep_shapes_static(self._engine)
        deepcompile.remove_leaf_hooks(self._engine)
        getter = torch.nn.Module.__getattr__
        dynamo.skip_function(getter)  # compiled, it would gather nothing
        self._exit_stack.callback(dynamo.unskip_function, getter)

        def around_passes(launch: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
            launch(*args, **kwargs)
            dynamo.skip_function(getter)
            self._graphs.refresh()

        # When DeepCompile launches new passes it resets Dynamo, and with it skipped functions.
        for owner, name, around in (
            (self._engine, "launch_compile_passes", around_passes),
            (self._engine, "forward", self._around_forward),
            (self._engine, "_backward_prologue", self._around_prologue),
            (self._engine, "_backward_epilogue", self._around_epilogue),
            (self._engine, "zero_grad", self._around_zero_grad),
            (self._optimizer, "zero_grad", self._around_zero_grad),
            (self._optimizer, "step", self._around_optimizer_step),
        ):
            self._exit_stack.callback(Layer(owner, name, around).remove)
        before_call, after_call = modules.call_hooks(self._engine, self.uses)
        read = dynamo.disabled(self._read_param)
        for module in self._engine.module.modules():
            for handle in (
                module.register_forward_pre_hook(before_call),
                module.register_forward_hook(after_call, always_call=True),
            ):
                self._exit_stack.callback(handle.remove)
            self._exit_stack.callback(modules.watch(module, read))

    def remove(self) -> None:
        """Remove the wrappers and hooks, and restore DeepSpeed's own fallback."""
        try:
            if self._phase is not Phase.ALONE:
                self._recover()
            if self._step.state is not StepState.HELD:
                # The graphs add to the partitions until a backward at the boundary has ended.
                zero3.zero_all_gradients(self._optimizer)
        finally:
            self._exit_stack.close()

    def _read_param(self, param: Any) -> Any:
        """Return the tensor that eager code gets for a parameter. Collective."""
        if not hasattr(param, "ds_id"):
            return param
        if not self.uses.calls:
            if not (self._phase is Phase.BACKWARD and torch.is_grad_enabled()):
                return param
            self.uses.recompute()
        use = self.uses.cached(param)
        if use is None and not dynamo.is_compiling_a_frame():
            use = self.uses.use(param)
        return param if use is None else use

    # --- Forwards, backwards and steps ------------------------------------------------------------

    def _around_forward(self, forward: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Gather parameters for a forward's eager code; first recover from a failed backward."""
        calls = self.uses.calls
        outermost = self._phase is not Phase.FORWARD
        if outermost:
            self._records_graph = torch.is_grad_enabled()
            self.uses.close(calls.truncate(0))  # calls of submodules by the script that raised
            self._recover()
            zero3.release_persistent(self._optimizer)
        depth = len(calls)
        calls.open(None)
        saves_notes = self._has_eager_frames and self._records_graph and outermost
        self._phase = Phase.FORWARD
        try:
            with self._saved_tensors_hooks if saves_notes else nullcontext():
                result = forward(*args, **kwargs)
        finally:
            self.uses.close(calls.truncate(depth))
            if outermost and self._phase is Phase.FORWARD:
                self._phase = Phase.IDLE
        if self._records_graph and outermost:
            self._has_eager_frames = self.uses.gathered_any
        return result

    def run_graph(self, graph_id: int, graph: Callable[..., Any], inputs: Any) -> Any:
        """Run a compiled graph, in a forward or for a recomputation in the backward."""
        outputs = self._saved_tensors_hooks.run_without(graph, inputs)
        if self._records_graph and (ids := self._graphs.params_written_by(graph_id)):
            before_backward(inputs, outputs, partial(self._begin_graph_backward, graph_id))
            params = () if graph_id in self._checked_graphs else self._engine.module.parameters()
            self._checked_graphs.add(graph_id)
            for param in params:
                hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
                if hooks and param.ds_id in ids:
                    self._warn_of_hook(param)
        return outputs

    def _begin_graph_backward(self, graph_id: int) -> None:
        """Defer the gradients that the backward of a graph may overwrite."""
        partitions = zero3.gradient_partitions(self._optimizer)
        for ds_id in self._graphs.begin_graph_backward(graph_id, self._written):
            if ds_id in partitions and partitions[ds_id].numel():
                self._defer(ds_id, partitions[ds_id], partitions[ds_id])
                partitions[ds_id].zero_()

    def _around_prologue(self, prologue: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Begin a backward after DeepSpeed's prologue, which a second backward may skip."""
        prologue(*args, **kwargs)
        self._graphs.begin_backward(self._engine.is_gradient_accumulation_boundary())
        if self._phase in (Phase.BACKWARD, Phase.ALONE):
            return  # the backward has reached another forward
        self._outer_phase, self._phase = self._phase, Phase.BACKWARD
        if self._step.state is StepState.HELD:
            self._written.update(zero3.gradient_partitions(self._optimizer))
        else:
            zero3.zero_all_gradients(self._optimizer)
            self._written.clear()
        self._step = self._step.after_backward(self._engine.micro_steps)

    def _around_epilogue(self, epilogue: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Complete the gradients of a backward before DeepSpeed's epilogue."""
        self._reduction.finish()
        self.uses.forget_backward()
        self._add_deferred()
        self._phase = self._outer_phase
        epilogue(*args, **kwargs)

    def _around_zero_grad(self, zero_grad: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        """Drop the step's gradients, if a backward has come since ``engine.step()`` counted one."""
        zero_grad(*args, **kwargs)
        if self._step.has_backward_in(self._engine.micro_steps):
            self._deferred.clear()
            self._step = Step()

    def _around_optimizer_step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Complete the gradients before the optimizer steps, or skips a step after an overflow."""
        self._reduction.finish()  # after a backward without an epilogue
        if self._step.state is not StepState.HELD:
            zero3.zero_all_gradients(self._optimizer)
        self._add_deferred()
        zero3.make_reduction_wait(self._optimizer)
        result = step(*args, **kwargs)
        self._graphs.after_step()
        self._step = Step()
        return result

    def _reduce_gradient(self, param: Any, grad: torch.Tensor) -> None:
        """Run a parameter's hooks on its full gradient from eager frames, and reduce it."""
        for hook in [*(param._backward_hooks or {}).values()]:
            changed = hook(grad)
            grad = grad if changed is None else changed
        if getattr(param, "_post_accumulate_grad_hooks", None):
            self._warn_of_hook(param)
        self._reduction.add(param, grad)

    def _warn_of_hook(self, param: Any) -> None:
        if param not in self._warned_params:
            self._warned_params.add(param)
            (name,) = (n for n, p in self._engine.module.named_parameters() if p is param)
            logger.warning(
                "A hook of parameter %s is not run: DeepCompile's graphs run none, and skipped "
                "frames none of register_post_accumulate_grad_hook().",
                name,
            )

    def _receive_part(self, param: Any, part: torch.Tensor) -> None:
        """Add this rank's part of a gradient; later, if a graph may overwrite the partition."""
        target = zero3.gradient_partitions(self._optimizer)[param.ds_id]
        if self._graphs.has_param(param.ds_id):
            self._defer(param.ds_id, part, target)
        else:
            target.add_(part)

    def _defer(self, ds_id: int, part: torch.Tensor, like: torch.Tensor) -> None:
        if ds_id not in self._deferred:
            self._deferred[ds_id] = torch.zeros_like(like)
        self._deferred[ds_id].add_(part)

    def _add_deferred(self) -> None:
        for ds_id, part in self._deferred.items():
            zero3.gradient_partitions(self._optimizer)[ds_id].add_(part)
        self._written.update(self._deferred)
        self._deferred.clear()

    def _recover(self) -> None:
        """Drop the step's gradients if its last backward raised. Collective in that case.

        Raises OtherRankFailed if it did not raise on all ranks.
        """
        self.uses.forget_backward()
        if self._phase not in (Phase.BACKWARD, Phase.ALONE):
            return
        # Dropping the gradients in the graphs takes collectives of all ranks.
        if absent := ranks.absent_ranks("dc_fallback"):
            self._phase = Phase.ALONE
            raise OtherRankFailed(
                f"a backward raised here, and none on rank {', '.join(map(str, absent))}: only all "
                "ranks together can drop its gradients in DeepCompile's graphs. Start the job again"
            )
        self._phase = Phase.IDLE
        logger.warning(
            "A backward raised: every gradient reduced since the last optimizer step was dropped."
        )
        self._reduction.abandon()
        self._deferred.clear()
        upstream_engine.reset_backward(self._engine)
        self._graphs.after_step(failed=True)
        self._step = Step(StepState.FAILED)
