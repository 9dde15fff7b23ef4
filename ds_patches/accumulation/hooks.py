"""The wrappers of DeepSpeed's methods. None of them is called once per parameter.

An engine is tracked from its first forward on, also if it was built before the patch was applied.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.steps import tracking
from ds_patches.steps.bf16_sum import Bf16Sum
from ds_patches.steps.division import (
    divide_leaves,
    divide_scaled_loss,
    divided_backward,
    engine_backwards,
    is_loss_divided,
)
from ds_patches.steps.graph_task import NO_TASK, current_task_id, graph_tensors
from ds_patches.steps.host_sum import HostSum
from ds_patches.steps.state import refuse_unseen_backward
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.sums import GradientSum
from ds_patches.steps.zero3_sum import Zero3Sum
from ds_patches.steps.zero12_sum import Zero12Sum
from ds_patches.upstream import coverage, zero12
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.classes import BF16, ZERO3, ZERO12, class_of

logger = logging.getLogger("ds_patches.accumulation")

_MIDDLE_OF_STEP = (
    "engine.set_train_batch_size() after %d micro step(s) of a step, which changes the number of "
    "its micro steps: call it right after the engine.step() that ends a step."
)

#: The wrappers that a training step calls look it up in the `__dict__` of an engine or its
#: optimizer, as `tracking.steps_of` does, which saves a call.
KEY = tracking.KEY
#: The last call of `around_count`: the id of the parameters' list, the graph task, and the count.
_counted = (0, NO_TASK, 0)


def activate() -> Sequence[str]:
    """Start tracking engines. Return a note about engines that were built before, if any."""
    tracking.make_sum = _make_sum
    if not (known := [*engines.known]):
        return []
    begun = sum(map(tracking.began_on_stock, known))
    late = f" ({begun} in the middle of a step: from the next step on)" if begun else ""
    return [f"{len(known)} engine(s) built before: patched from their next forward on{late}"]


def deactivate() -> None:
    """Stop tracking every engine."""
    tracking.detach_all()


def _make_sum(engine: Any) -> GradientSum | None:
    """Return the gradient sum of an engine; None if the patch does not cover the engine."""
    reason = coverage.why_not_covered(engine)
    if reason is None:
        zero12_sum = HostSum if getattr(engine.optimizer, "cpu_offload", False) else Zero12Sum
        sums = {ZERO12: zero12_sum, ZERO3: Zero3Sum, BF16: Bf16Sum}
        return sums[class_of(engine.optimizer)](engine)
    if reason:
        logger.warning("accumulation does not patch this engine: %s.", reason)
    return None


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Watch the outputs of DeepSpeed's forward, because backwards begin at them."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or coverage.is_compiled(engine):
        steps = tracking.track(engine)
        if steps is None:
            return wrapped(*args, **kwargs)
    if tracking.checked_engine_count != engines.count:
        tracking.separate_rivals()
    if steps.watch.raised:
        steps.drop_failed_backward()
    outputs = wrapped(*args, **kwargs)
    if torch.is_grad_enabled():
        tensors = graph_tensors(outputs)
        steps.forward_ran(tensors)
        if steps.is_torch_style and engine.gradient_accumulation_steps() > 1:
            divide_leaves((args, kwargs), tensors, steps.running_divisor)
    return outputs


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count DeepSpeed's backward of a loss for this engine, whatever made the loss."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or coverage.is_compiled(engine):
        steps = tracking.track(engine)
    loss, *rest = args if args and not kwargs else in_order(wrapped, args, kwargs)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return wrapped(loss, *rest)  # DeepSpeed raises
    run = wrapped
    if upstream_engine.divides_at_outputs() and (
        steps.is_torch_style if steps is not None else _divides_eagerly(engine)
    ):
        run = partial(divided_backward, wrapped, engine)
    engine_backwards.append(engine)
    begun, handle = 0 if steps is None else steps.backwards_begun, None
    try:
        if steps is not None:
            if loss.grad_fn is None or loss._backward_hooks:  # it begins before its hooks
                loss = loss.view_as(loss)
            handle = loss.register_hook(partial(steps.enter_backward, is_backward=True))  # type: ignore[no-untyped-call]
            for listener in steps.listeners:
                run = listener.wrap_backward(run)
        return run(loss, *rest)
    except BaseException:
        if steps is not None and steps.backwards_begun != begun:
            steps.drop_failed_backward()
        raise
    finally:
        engine_backwards.pop()
        if handle is not None:
            handle.remove()


def around_per_tensor(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return an output's gradient undivided: it is divided when it is reduced."""
    if vars(engine).get(KEY) is None and not (is_loss_divided() and _divides_eagerly(engine)):
        return wrapped(*args, **kwargs)
    return args[0] if args else in_order(wrapped, args, kwargs)[0]


def _divides_eagerly(engine: Any) -> bool:
    """Return True if the loss of an engine that is not tracked is divided here.

    Without this, nothing divides the losses of pipelines and of compiled engines.
    """
    if engine.pipeline_parallelism or not upstream_engine.has_torch_style_backward(engine):
        return False
    trains = hasattr(engine.optimizer, "step") and not getattr(engine, "zenflow", False)
    return trains and not coverage.compiles_backward(engine)


def around_scale(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Scale a loss as DeepSpeed does, and divide its gradient by the micro steps.

    Accepts the ``retain_graph`` of upstream's open pull request 8135, which is not needed here.
    """
    steps = tracking.track(engine)
    scaled = wrapped(
        *args, **{key: value for key, value in kwargs.items() if key != "retain_graph"}
    )
    if steps is not None and steps.is_torch_style and engine.optimizer.needs_scaler():
        divide_scaled_loss(engine, scaled, lambda: steps.watch.running)
    return scaled


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run DeepSpeed's prologue once per backward, where DeepSpeed runs it once per forward."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        return wrapped(*args, **kwargs)
    if steps.prologue_is_due:
        steps.prologue_is_due = False
        return wrapped(*args, **kwargs)
    if steps.watch.task_id != current_task_id():
        steps.enter_backward()
    return None


def around_enter_backward(wrapped: Wrapped, state: Any, args: Args, kwargs: Kwargs) -> Any:
    """Begin a backward at a gradient that bypassed all outputs, unless one is running."""
    steps: EngineSteps | None = vars(state).get(KEY)
    if steps is None or steps.watch.running:
        return wrapped(*args, **kwargs)
    return steps.enter_at_parameter()


def around_post_hook(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the epilogue of a plain backward, unless it is nested or has reached no parameter.

    In 0.18.3 and 0.18.4 DeepSpeed runs it at a graph task's last gradient; here at the task's end.
    """
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is not None:
        watch = steps.watch
        if steps.defers_epilogue and watch.running:
            steps.epilogue_is_due = True
            return None
        if watch.task_id not in (None, current_task_id()) and watch.running:
            return None  # nested: the outer backward runs it
        # DeepSpeed's epilogue fails if a plain backward has reached no parameter of the engine.
        is_empty = engine not in engine_backwards and upstream_engine.saw_gradients(engine) is False
        if is_empty and steps.end_empty_backward():
            return None
    return wrapped(*args, **kwargs)


def around_zero_grad(wrapped: Wrapped, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """Drop the step's gradients in ``zero_grad()`` of the engine or its ZeRO optimizer."""
    steps: EngineSteps | None = vars(owner).get(KEY)
    result = wrapped(*args, **kwargs)
    if steps is not None:
        steps.zero_grad()
    return result


def around_batch_size(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> None:
    """Begin a step of the new number of micro steps at this call.

    DeepSpeed counts as if every step had had the new number, so the next step would end early.
    """
    begun = engine.micro_steps % engine.gradient_accumulation_steps()
    wrapped(*args, **kwargs)
    if engine.pipeline_parallelism:  # its schedule counts by itself
        return
    if begun:
        logger.warning(_MIDDLE_OF_STEP, begun)
    else:
        upstream_engine.restart_micro_steps(engine)


def around_model_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Step the optimizer with gradients of this step only."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        if KEY not in vars(engine):  # only ``engine.module`` was called
            refuse_unseen_backward(engine)
        return wrapped(*args, **kwargs)
    result = steps.step(partial(wrapped, *args, **kwargs))
    tracking.note_step(engine)
    return result


# --- ZeRO ---------------------------------------------------------------------------------------


def around_all_grad_tensors(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep the gradients of earlier micro steps, which 0.17.6 to 0.18.2 lose."""
    if class_of(optimizer) != ZERO12:
        return wrapped(*args, **kwargs)
    return zero12.collect_and_add(wrapped, optimizer, *in_order(wrapped, args, kwargs))


def around_split(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Keep gradients on the CPU when they are sorted by dtype, which releases up to 0.19.7 drop."""
    (tensors,) = in_order(wrapped, args, kwargs)
    split = wrapped(tensors)
    return split if sum(map(len, split)) == len(tensors) else zero12.bucket_by_dtype(tensors)


# --- Gradients that a script reads or sets at stage 3, as ``safe_set_full_grad`` does -------------
#
# A gradient that is set replaces the step's gradient so far. A gradient that is read is one of this
# step: zero, if no backward of this step has reached the parameter.


def around_get_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Zero gradients of older steps before DeepSpeed reads a parameter's gradient."""
    if (partitions := _partitions_of(optimizer)) is not None:
        partitions.zero_stale(*in_order(wrapped, args, kwargs))
    return wrapped(*args, **kwargs)


def around_set_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count a gradient that DeepSpeed sets, for a script, as one of this step."""
    if (partitions := _partitions_of(optimizer)) is None:
        return wrapped(*args, **kwargs)
    _, params = in_order(wrapped, args, kwargs)
    by_id = partitions.zero_stale(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    partitions.mark_written(by_id)
    return result


def _partitions_of(optimizer: Any) -> Zero3Sum | None:
    steps = vars(optimizer).get(KEY) or tracking.steps_of_optimizer(optimizer)
    return steps.sum if steps is not None and isinstance(steps.sum, Zero3Sum) else None


# --- What a backward will reach ------------------------------------------------------------------


def around_count(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count the parameters that a backward reaches once per backward, not once per gradient.

    Up to PyTorch 2.4 a parameter has an autograd node only while gradients are enabled.
    """
    global _counted
    (parameters,) = in_order(wrapped, args, kwargs)
    task = current_task_id()
    counted = _counted  # one read: another thread may replace it
    if counted[:2] != (id(parameters), task) or task == NO_TASK:
        with torch.enable_grad():
            counted = _counted = id(parameters), task, wrapped(parameters)
    return counted[2]
