"""The wrappers around DeepSpeed's methods. None of them is called for each parameter.

An engine is taken in at its first forward, so one that was built before the patch was applied is
as good as one built after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.runtime.attributes import Args, Kwargs, Wrapped, meanwhile
from ds_patches.runtime.engines import built
from ds_patches.runtime.graph_task import NO_TASK, accumulates, current_task_id

from . import engines, pipeline
from .flat_sum import FlatSum
from .partition_sum import PartitionSum
from .steps import EngineSteps
from .upstream import engine as upstream_engine
from .upstream import flat

#: Looked up in the `__dict__` of an engine or its optimizer, as `engines.of` does, by each wrapper
#: that a training step calls: a call less for each.
KEY = engines.KEY
#: The list of parameters that was counted last, in which graph task, and how many that reaches.
_counted = (0, NO_TASK, 0)


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Name what is out of reach."""
    count = len(built())
    return [f"{count} engine(s) built before: patched from their next forward on"] if count else []


def deactivate() -> Sequence[str]:
    """Leave every engine to stock."""
    engines.detach_all()
    return []


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_forward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or engine._is_compiled:
        steps = engines.take_in(engine)
        if steps is None:
            return wrapped(*args, **kwargs)
    if steps.watch.raised:
        steps.recover()
    outputs = wrapped(*args, **kwargs)
    if torch.is_grad_enabled():
        steps.forward_ran(outputs)
    return outputs


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        steps = engines.take_in(engine)
    loss = args[0] if args else kwargs.pop("loss", None)
    if engine.pipeline_parallelism:
        loss = pipeline.averaged(engine, loss)
    if steps is None or not isinstance(loss, torch.Tensor):
        return wrapped(loss, *args[1:], **kwargs)
    if not upstream_engine.divides_at_outputs():
        return steps.backward(loss, wrapped, *args[1:], **kwargs)
    if _scales(*args[1:], **kwargs):
        loss = loss / engine.gradient_accumulation_steps()
    kwargs = {**kwargs, "scale_wrt_gas": False}
    with meanwhile(steps, has_divided=True):
        return steps.backward(loss, wrapped, *args[1:2], **kwargs)


def around_per_tensor(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if engine.pipeline_parallelism and pipeline.is_divided(engine):
        return args[0]
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None or (not steps.has_divided and (steps.watch.runs_here or accumulates())):
        return wrapped(*args, **kwargs)
    return args[0]  # divided, or of torch.autograd.grad


def _scales(retain_graph: bool = False, scale_wrt_gas: bool = True) -> bool:
    return scale_wrt_gas


def around_scale(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Accept the ``retain_graph`` of upstream's open pull request 8135; it is not needed here."""
    kwargs.pop("retain_graph", None)
    return wrapped(*args[:1], **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    steps: EngineSteps | None = vars(engine).get(KEY)
    if engine.pipeline_parallelism:
        return pipeline.prologue(engine, wrapped)
    if steps is None or steps.prologue_is_due:
        return wrapped(*args, **kwargs)
    return steps.output_entered()


def around_enter_backward(wrapped: Wrapped, state: Any, args: Args, kwargs: Kwargs) -> Any:
    """Upstream's prologue calls it, and else a gradient that none of the outputs has led to."""
    steps: EngineSteps | None = vars(state).get(KEY)
    if steps is None or steps.watch.running:
        return wrapped(*args, **kwargs)
    return steps.parameter_entered()


def around_post_hook(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """It has the epilogue of a backward that ``engine.backward`` has not begun."""
    steps: EngineSteps | None = vars(engine).get(KEY)
    return wrapped(*args, **kwargs) if steps is None else steps.post_hook(wrapped)


def around_zero_grad(wrapped: Wrapped, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of the engine and of its ZeRO optimizer."""
    steps: EngineSteps | None = vars(owner).get(KEY)
    result = wrapped(*args, **kwargs)
    if steps is not None:
        steps.zero_grad()
    return result


def around_model_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    steps: EngineSteps | None = vars(engine).get(KEY)
    if steps is None:
        return wrapped(*args, **kwargs)
    return steps.step(partial(wrapped, *args, **kwargs))


# --- ZeRO ---------------------------------------------------------------------------------------


def around_flat_epilogue(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    steps: EngineSteps | None = vars(optimizer).get(KEY)
    if steps is None or not isinstance(steps.sum, FlatSum):
        return wrapped(*args, **kwargs)
    return steps.epilogue(wrapped)


def around_all_grad_tensors(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    if not flat.forgets_micro_steps(optimizer):
        return wrapped(*args, **kwargs)
    return flat.add_to_earlier(wrapped, optimizer, *args, *kwargs.values())


def around_split(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Up to 0.19.7 it finds no gradient on a CPU: ``contiguous_gradients`` off reduces nothing."""
    (tensors,) = (*args, *kwargs.values())
    found = wrapped(tensors)
    return found if sum(map(len, found)) == len(tensors) else flat.by_dtype(tensors)


# --- Gradients that a script reads or gives by hand at stage 3, as ``safe_set_full_grad`` does ---
#
# What is given is newer than all that a step has so far, and what is read is of this step: an older
# step's gradient, of a parameter that this one has not reached, reads as zero.


def around_get_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The gradient of a parameter, or this rank's part of it."""
    if (partitions := _partitions_of(optimizer)) is not None:
        partitions.settle(*args, *kwargs.values())
    return wrapped(*args, **kwargs)


def around_set_grad(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """A value for one parameter's gradient, or a function to change those of several."""
    if (partitions := _partitions_of(optimizer)) is None:
        return wrapped(*args, **kwargs)
    _, params = (*args, *kwargs.values())
    ids = partitions.settle(*params if isinstance(params, (list, tuple)) else [params])
    result = wrapped(*args, **kwargs)
    partitions.given(ids)
    return result


def _partitions_of(optimizer: Any) -> PartitionSum | None:
    steps = vars(optimizer).get(KEY) or engines.of_optimizer(optimizer)
    return steps.sum if steps is not None and isinstance(steps.sum, PartitionSum) else None


# --- What a backward will reach ------------------------------------------------------------------


def around_count(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """It is asked at each gradient, and what a graph task reaches does not change.

    To PyTorch 2.4 a parameter has its node only where gradients are recorded.
    """
    global _counted
    (parameters,) = args
    task = current_task_id()
    counted = _counted  # another thread may be in another task
    if counted[:2] != (id(parameters), task) or task == NO_TASK:
        with torch.enable_grad():
            counted = _counted = id(parameters), task, wrapped(parameters)
    return counted[2]
