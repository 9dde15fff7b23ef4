"""The engines that gather in each backward anew: every ZeRO-3 engine that `accumulation` keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.steps import attached
from ds_patches.steps.attached import Attached
from ds_patches.steps.graph_task import NO_TASK, current_task_id, recomputes_for_hooks
from ds_patches.upstream import zero3, zero3_gathers

from .gathers import Gathers


def _take_in(engine: Any) -> Gathers | None:
    steps = attached.of(engine.optimizer)
    if steps is None or not engine.zero_optimization_partition_weights():
        return None
    offload = engine.optimizer.parameter_offload
    gathers = Gathers(offload, version=lambda: steps.steps_taken)
    gathers.install()
    _gathers.share(offload, gathers)
    return gathers


_gathers: Attached[Gathers] = Attached("zero3_retain", _take_in)


def activate() -> Sequence[str]:
    """Take in the engines that are known already."""
    attached.subscribe(_gathers)
    return []


def deactivate() -> None:
    """Put stock's functions back at every module of every engine."""
    for gathers in attached.unsubscribe(_gathers):
        gathers.remove()


def around_register(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed puts hooks on a module: it gets the patch's, too, if its engine has them already.

    Upstream registers the children by the same method, so each call answers for one module.
    """
    result = wrapped(*args, **kwargs)
    if (gathers := _gathers.get(offload)) is not None:
        gathers.install_at(in_order(wrapped, args, kwargs)[0])
    return result


def around_forward_release(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed releases a module that has run; here, later if it ran to be recomputed."""
    if current_task_id() == NO_TASK or not recomputes_for_hooks():
        return wrapped(*args, **kwargs)
    if (gathers := _gathers.get(offload)) is None:
        return wrapped(*args, **kwargs)
    (module,) = in_order(wrapped, args, kwargs)
    gathers.post_recompute(module, partial(wrapped, module))
    return None


def around_attribution(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed keeps a frozen parameter for modules whose backward has begun; here, not always.

    Reentrant recomputation has a backward of its own, which gathers and releases each module.
    """
    if recomputes_for_hooks():
        wrapped(*args, **kwargs)


def around_enter(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` begins: forwards within the block do not release its parameters."""
    result = wrapped(*args, **kwargs)
    for gathers in _of_block(gathered):
        zero3_gathers.hold_params(gathers.offload, gathered.params)
    return result


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` ends: graphs made within it may still need its parameters."""
    for gathers in _of_block(gathered):
        zero3_gathers.release_hold(gathered.params)
        if torch.is_grad_enabled():
            gathers.used.note(gathered.params)
    return wrapped(*args, **kwargs)


def _of_block(gathered: Any) -> Iterator[Gathers]:
    for optimizer in zero3.optimizers_of(gathered):
        attached.of_optimizer(optimizer)  # also before the first forward
        if (gathers := _gathers.get(optimizer.parameter_offload)) is not None:
            yield gathers
