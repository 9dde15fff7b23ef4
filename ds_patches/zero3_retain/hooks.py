"""The wrappers of zero3_retain; every ZeRO-3 engine that `accumulation` covers is covered."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.steps import tracking
from ds_patches.steps.attached import Attached
from ds_patches.steps.graph_task import NO_TASK, current_task_id, is_recomputing
from ds_patches.upstream import zero3, zero3_gathers

from .gathers import Gathers


def _gathers_of(engine: Any) -> Gathers | None:
    """Return new `Gathers` of an engine, installed at its modules; None without ZeRO-3."""
    steps = tracking.steps_of(engine.optimizer)
    if steps is None or not engine.zero_optimization_partition_weights():
        return None
    offload = engine.optimizer.parameter_offload
    gathers = Gathers(offload, version=lambda: steps.steps_taken)
    gathers.install()
    _gathers.set(offload, gathers)
    return gathers


_gathers: Attached[Gathers] = Attached("zero3_retain", _gathers_of)


def activate() -> Sequence[str]:
    """Replace the Functions at the modules of engines that exist already."""
    tracking.subscribe(_gathers)
    return []


def deactivate() -> None:
    """Restore DeepSpeed's Functions at every module of every engine."""
    for gathers in tracking.unsubscribe(_gathers):
        gathers.remove()


def around_register(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """Replace DeepSpeed's Functions at a module that it registers after the engine was covered.

    DeepSpeed registers the children by the same method, so each call handles one module.
    """
    result = wrapped(*args, **kwargs)
    if (gathers := _gathers.get(offload)) is not None:
        gathers.install_at(in_order(wrapped, args, kwargs)[0])
    return result


def around_forward_release(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """Release a module after its forward; later if the forward was a recomputation."""
    recomputes = current_task_id() != NO_TASK and is_recomputing()
    if not recomputes or (gathers := _gathers.get(offload)) is None:
        return wrapped(*args, **kwargs)
    (module,) = in_order(wrapped, args, kwargs)
    gathers.post_recompute(module, partial(wrapped, module))
    return None


def around_attribution(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Keep DeepSpeed from holding frozen parameters that reentrant checkpointing recomputes.

    Reentrant recomputation has a backward of its own, which gathers and releases each module.
    """
    if is_recomputing():
        wrapped(*args, **kwargs)


def around_enter(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keep forwards within a ``GatheredParameters`` from releasing its parameters."""
    covering = [*_gathers_of_block(gathered)]
    for gathers in covering:
        gathers.exit_blocks_before(gathered.params)
    result = wrapped(*args, **kwargs)
    for gathers in covering:
        zero3_gathers.hold_params(gathers.offload, gathered.params)
    return result


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """Note the parameters of a ``GatheredParameters``, for graphs made within it.

    In reentrant recomputation, keep them gathered for the backward that is nested in the node.
    """

    def exit_block() -> Any:
        zero3_gathers.release_hold(gathered.params)
        return wrapped(*args, **kwargs)

    covering = [*_gathers_of_block(gathered)]
    if not covering or not torch.is_grad_enabled():
        return exit_block() if covering else wrapped(*args, **kwargs)
    if current_task_id() != NO_TASK and not is_recomputing() and not zero3.broadcasts(gathered):
        return covering[0].exit_after_node(gathered.params, exit_block)
    for gathers in covering:
        gathers.block_params.add(gathered.params)
    return exit_block()


def _gathers_of_block(gathered: Any) -> Iterator[Gathers]:
    """Yield the `Gathers` of the engines whose parameters a block holds."""
    for optimizer in zero3.optimizers_of(gathered):
        tracking.steps_of_optimizer(optimizer)  # covers the engine, also before its first forward
        if (gathers := _gathers.get(optimizer.parameter_offload)) is not None:
            yield gathers
