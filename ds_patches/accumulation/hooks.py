"""The wrappers around DeepSpeed's methods. None of them is called for each parameter.

An engine is taken in at its first forward, so one that was built before the patch was applied is
as good as one built after.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.steps import attached
from ds_patches.steps.bf16_sum import Bf16Sum
from ds_patches.steps.division import (
    divide_leaves,
    divide_scaled,
    divided_backward,
    engine_backwards,
    is_divided,
)
from ds_patches.steps.graph_task import (
    NO_TASK,
    current_task_id,
    with_graphs,
)
from ds_patches.steps.step import EngineSteps, refuse_missed
from ds_patches.steps.sums import GradientSum
from ds_patches.steps.zero3_sum import Zero3Sum
from ds_patches.steps.zero12_sum import Zero12Sum
from ds_patches.upstream import coverage, zero12
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream.classes import BF16, ZERO3, ZERO12, class_of

logger = logging.getLogger("ds_patches.accumulation")

_IN_THE_MIDDLE = (
    "engine.set_train_batch_size() after %d micro step(s) of a step, which is now of another "
    "number of them: call it right after the engine.step() that ends one."
)

#: Looked up in the `__dict__` of an engine or its optimizer, as `attached.of` does, by each wrapper
#: that a training step calls: a call less for each.
KEY = attached.KEY
#: The list of parameters that was counted last, in which graph task, and how many that reaches.
_counted = (0, NO_TASK, 0)


def activate() -> Sequence[str]:
    """Name what is out of reach."""
    attached.keep(_sum_of)
    if not (found := [*engines.known]):
        return []
    begun = sum(map(attached.waits, found))
    late = f" ({begun} in the middle of a step: after that)" if begun else ""
    return [f"{len(found)} engine(s) built before: patched from their next forward on{late}"]


def deactivate() -> None:
    """Leave every engine to stock."""
    attached.detach_all()


def _sum_of(engine: Any) -> GradientSum | None:
    """Return what adds up the gradients of an engine's steps; None leaves the engine to stock."""
    reason = coverage.why_not_covered(engine)
    if reason is None:
        sums = {ZERO12: Zero12Sum, ZERO3: Zero3Sum, BF16: Bf16Sum}
        return sums[class_of(engine.optimizer)](engine)
    if reason:
        logger.warning("accumulation leaves this engine to stock DeepSpeed: %s.", reason)
    return None


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's forward; here its outputs are watched, because backwards begin at them."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or coverage.is_compiled(engine):
        steps = attached.take_in(engine)
        if steps is None:
            return wrapped(*args, **kwargs)
    if attached.counted != engines.count:
        attached.keep_apart()
    if steps.watch.raised:
        steps.drop_failed_backward()
    outputs = wrapped(*args, **kwargs)
    if torch.is_grad_enabled():
        tensors = with_graphs(outputs)
        steps.forward_ran(tensors)
        if steps.divides and engine.gradient_accumulation_steps() > 1:
            divide_leaves((args, kwargs), tensors, steps.divisor_now)
    return outputs


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's backward of a loss; here it counts for this engine, whatever made the loss."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or coverage.is_compiled(engine):
        steps = attached.take_in(engine)
    loss, *rest = args if args and not kwargs else in_order(wrapped, args, kwargs)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return wrapped(loss, *rest)  # for upstream to refuse
    run = wrapped
    if upstream_engine.divides_at_outputs() and (
        steps.divides if steps is not None else _divides_eagerly(engine)
    ):
        run = partial(divided_backward, wrapped, engine)
    engine_backwards.append(engine)
    begun, handle = 0 if steps is None else steps.backwards_begun, None
    try:
        if steps is not None:
            if loss.grad_fn is None or loss._backward_hooks:  # which are to come after ours
                loss = loss.view_as(loss)
            handle = loss.register_hook(partial(steps.entered, is_backward=True))  # type: ignore[no-untyped-call]
            for listener in steps.listeners:
                run = listener.backward_by(run)
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
    """DeepSpeed divides the gradient that comes to an output; here, it is divided when reduced."""
    if vars(engine).get(KEY) is None and not (is_divided() and _divides_eagerly(engine)):
        return wrapped(*args, **kwargs)
    return in_order(wrapped, args, kwargs)[0]


def _divides_eagerly(engine: Any) -> bool:
    """Return True if the losses of an engine that is left to stock are divided here.

    Without this, those of pipelines and of compiled engines are divided nowhere.
    """
    return upstream_engine.divides_gradients(engine) and not coverage.compiles_backward(engine)


def around_scale(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed scales a loss; here, its gradient is divided by the micro steps as well.

    Accepts the ``retain_graph`` of upstream's open pull request 8135; it is not needed here.
    """
    steps = attached.take_in(engine)
    scaled = wrapped(
        *args, **{key: given for key, given in kwargs.items() if key != "retain_graph"}
    )
    if steps is not None and steps.divides and engine.optimizer.needs_scaler():
        divide_scaled(engine, scaled, lambda: steps.watch.running)
    return scaled


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's prologue runs once for a forward; here, once for a backward."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or steps.prologue_is_due:
        return wrapped(*args, **kwargs)
    if steps.watch.task_id != current_task_id():
        steps.entered()
    return None


def around_enter_backward(wrapped: Wrapped, state: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed begins a backward, in its prologue or at a gradient that came past all outputs."""
    steps: EngineSteps | None = vars(state).get(KEY)
    if steps is None or steps.prologue_is_due or steps.watch.running:
        return wrapped(*args, **kwargs)
    return steps.parameter_entered()


def around_post_hook(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed runs the epilogue of a plain backward; here not of one within another.

    In 0.18.3 and 0.18.4 it does so at the last gradient of a graph task; here, as a backward ends.
    """
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is not None:
        watch = steps.watch
        if steps.ends_late and watch.running:
            steps.epilogue_is_due = True
            return None
        if watch.task_id not in (None, current_task_id()) and watch.running:
            return None  # one inside another leaves it to the outer one
        is_plain = engine not in engine_backwards
        if is_plain and upstream_engine.reached_no_parameter(engine) and steps.passed_by():
            return None
    return wrapped(*args, **kwargs)


def around_zero_grad(wrapped: Wrapped, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """The engine's ``zero_grad()``, and its ZeRO optimizer's."""
    steps: EngineSteps | None = vars(owner).get(KEY)
    result = wrapped(*args, **kwargs)
    if steps is not None:
        steps.zero_grad()
    return result


def around_batch_size(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed changes the number of micro steps; here a step begins at the call.

    Upstream counts as if there had always been so many, so the next step would end early.
    """
    begun = engine.micro_steps % engine.gradient_accumulation_steps()
    wrapped(*args, **kwargs)
    if engine.pipeline_parallelism:  # whose schedule counts for itself
        return
    if begun:
        logger.warning(_IN_THE_MIDDLE, begun)
    else:
        upstream_engine.restart_micro_steps(engine)


def around_model_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step of the optimizer; here it finds only gradients of this step."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        if KEY not in vars(engine):  # nobody has called the engine, but ``engine.module``
            refuse_missed(engine)
        return wrapped(*args, **kwargs)
    result = steps.step(partial(wrapped, *args, **kwargs))
    attached.has_stepped(engine)
    return result


# --- ZeRO ---------------------------------------------------------------------------------------


def around_all_grad_tensors(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed takes the gradients of a micro step; 0.17.6 to 0.18.2 forget earlier ones."""
    if class_of(optimizer) != ZERO12:
        return wrapped(*args, **kwargs)
    return zero12.collect_and_add(wrapped, optimizer, *in_order(wrapped, args, kwargs))


def around_split(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed sorts gradients by dtype; up to 0.19.7 it drops those on a CPU."""
    (tensors,) = in_order(wrapped, args, kwargs)
    found = wrapped(tensors)
    return found if sum(map(len, found)) == len(tensors) else zero12.bucket_by_dtype(tensors)


# --- Gradients that a script reads or gives by hand at stage 3, as ``safe_set_full_grad`` does ---
#
# What is given is newer than all that a step has so far, and what is read is of this step: an older
# step's gradient, of a parameter that this one has not reached, reads as zero.


def around_get_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed reads a parameter's gradient, or this rank's part of it."""
    if (partitions := _partitions_of(optimizer)) is not None:
        partitions.settle(*in_order(wrapped, args, kwargs))
    return wrapped(*args, **kwargs)


def around_set_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed sets a parameter's gradient, or changes several by a function."""
    if (partitions := _partitions_of(optimizer)) is None:
        return wrapped(*args, **kwargs)
    _, params = in_order(wrapped, args, kwargs)
    by_id = partitions.settle(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    partitions.given(by_id)
    return result


def _partitions_of(optimizer: Any) -> Zero3Sum | None:
    steps = vars(optimizer).get(KEY) or attached.of_optimizer(optimizer)
    return steps.sum if steps is not None and isinstance(steps.sum, Zero3Sum) else None


# --- What a backward will reach ------------------------------------------------------------------


def around_count(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed counts at each gradient what a backward will reach; here, once for a backward.

    To PyTorch 2.4 a parameter has its node only where gradients are recorded.
    """
    global _counted
    (parameters,) = in_order(wrapped, args, kwargs)
    task = current_task_id()
    counted = _counted  # another thread may be in another task
    if counted[:2] != (id(parameters), task) or task == NO_TASK:
        with torch.enable_grad():
            counted = _counted = id(parameters), task, wrapped(parameters)
    return counted[2]
