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
from ds_patches.steps.division import Division, divided_backward, divisions
from ds_patches.steps.graph_task import (
    NO_TASK,
    accumulates,
    current_task_id,
    with_graphs,
)
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.sums import GradientSum
from ds_patches.steps.zero3_sum import Zero3Sum
from ds_patches.steps.zero12_sum import Zero12Sum
from ds_patches.upstream import engine as upstream_engine
from ds_patches.upstream import zero12
from ds_patches.upstream.kinds import Kind, kind_of

logger = logging.getLogger("ds_patches.accumulation")

_IN_THE_MIDDLE = (
    "engine.set_train_batch_size() after %d micro step(s) of a step, which is now of another "
    "number of them: call it right after the engine.step() that ends one."
)

#: Looked up in the `__dict__` of an engine or its optimizer, as `attached.of` does, by each wrapper
#: that a training step calls: a call less for each.
KEY = attached.KEY
_DIVISION = divisions.key
#: The list of parameters that was counted last, in which graph task, and how many that reaches.
_counted = (0, NO_TASK, 0)


def activate() -> Sequence[str]:
    """Name what is out of reach."""
    attached.keep(_sum_of)
    if not (found := engines.built()):
        return []
    begun = sum(map(attached.waits, found))
    late = f" ({begun} in the middle of a step: after that)" if begun else ""
    return [f"{len(found)} engine(s) built before: patched from their next forward on{late}"]


def deactivate() -> None:
    """Leave every engine to stock."""
    divisions.detach_all()
    attached.detach_all()


def _sum_of(engine: Any) -> GradientSum | None:
    """Return what adds up the gradients of an engine's steps; None leaves the engine to stock.

    Called once for an engine, whose plain backwards are divided rightly from then on.
    """
    divisions(engine)
    reason = upstream_engine.why_not_covered(engine)
    if reason is None:
        sums = {Kind.ZERO12: Zero12Sum, Kind.ZERO3: Zero3Sum, Kind.BF16: Bf16Sum}
        return sums[kind_of(engine.optimizer)](engine)
    if reason:
        logger.warning("accumulation leaves this engine to stock DeepSpeed: %s.", reason)
    return None


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's forward; here its outputs are watched, because backwards begin at them."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or upstream_engine.is_compiled(engine):
        steps = attached.take_in(engine)
        if steps is None:
            return wrapped(*args, **kwargs)
    if attached.counted != engines.count:
        attached.keep_apart()
    if steps.watch.raised:
        steps.drop_failed_backward()
    outputs = wrapped(*args, **kwargs)
    if torch.is_grad_enabled():
        seen, unseen = with_graphs(outputs)
        steps.forward_ran(seen + unseen)
        division: Division | None = vars(engine).get(_DIVISION)
        if division is not None and engine.gradient_accumulation_steps() > 1:
            for tensor in unseen:
                tensor.register_hook(engine._backward_prologue_per_tensor)  # type: ignore[no-untyped-call]
            division.forward_ran((args, kwargs), seen + unseen)
    return outputs


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's backward of a loss; here it counts for this engine, whatever made the loss."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or upstream_engine.is_compiled(engine):
        steps = attached.take_in(engine)
    loss, *rest = args if args and not kwargs else in_order(wrapped, args, kwargs)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return wrapped(loss, *rest)  # for upstream to refuse
    run = wrapped
    if vars(engine).get(_DIVISION) is not None and upstream_engine.divides_at_outputs():
        run = partial(divided_backward, wrapped, engine)
    if steps is None:
        return run(loss, *rest)
    if loss.grad_fn is None or loss._backward_hooks:  # which are to come after ours
        loss = loss.view_as(loss)
    begun, outer = steps.backwards_begun, steps.in_engine_backward
    steps.in_engine_backward = True
    handle = loss.register_hook(partial(steps.entered, is_backward=True))  # type: ignore[no-untyped-call]
    try:
        for listener in steps.listeners:
            run = listener.backward_by(run)
        return run(loss, *rest)
    except BaseException:
        if steps.backwards_begun != begun:
            steps.drop_failed_backward()
        raise
    finally:
        handle.remove()
        steps.in_engine_backward = outer


def around_per_tensor(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed divides the gradient that comes to an output; here, only if nobody did before."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    (grad,) = in_order(wrapped, args, kwargs)
    is_backward = steps is None or steps.watch.task_id == current_task_id()
    if Division.has_divided or not (is_backward or accumulates()):
        return grad  # divided, or of torch.autograd.grad
    result = wrapped(grad)
    division: Division | None = vars(engine).get(_DIVISION)
    if division is not None and result is not grad:
        division.divided()
    return result


def around_scale(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Accept the ``retain_graph`` of upstream's open pull request 8135; it is not needed here."""
    return wrapped(*args, **{key: one for key, one in kwargs.items() if key != "retain_graph"})


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
    """DeepSpeed runs the epilogue of a plain backward; here not of one within another."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is not None:
        watch = steps.watch
        if watch.task_id not in (None, current_task_id()) and watch.running:
            return None  # one inside another leaves it to the outer one
        is_plain = not steps.in_engine_backward
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
        upstream_engine.count_anew(engine)


def around_model_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step of the optimizer; here it finds only gradients of this step."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        return wrapped(*args, **kwargs)
    result = steps.step(partial(wrapped, *args, **kwargs))
    attached.has_stepped(engine)
    return result


# --- ZeRO ---------------------------------------------------------------------------------------


def around_all_grad_tensors(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed takes the gradients of a micro step; some releases forget earlier micro steps."""
    if not zero12.forgets_micro_steps(optimizer):
        return wrapped(*args, **kwargs)
    return zero12.add_to_earlier(wrapped, optimizer, *in_order(wrapped, args, kwargs))


def around_split(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed sorts gradients by dtype; up to 0.19.7 it drops those on a CPU."""
    (tensors,) = in_order(wrapped, args, kwargs)
    found = wrapped(tensors)
    return found if sum(map(len, found)) == len(tensors) else zero12.by_dtype(tensors)


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
    ids = partitions.settle(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    partitions.given(ids)
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
