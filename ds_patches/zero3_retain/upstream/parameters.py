"""Stage 3 parameters: who is registered, what is gathered, what the prefetcher queued."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_COORDINATOR = "_PartitionedParameterCoordinator__"
_ACTIVE_FETCHES = _COORDINATOR + "active_backward_submodules"
_LEAF_INPUTS = "_leaf_module_inputs_remaining"


def registered_modules(offload: Any) -> Iterator[torch.nn.Module]:
    """Modules whose hooks `offload` set: all but what lies inside a z3 leaf module."""
    pending = [offload.module]
    while pending:
        module = pending.pop()
        yield module
        if not is_leaf(module):
            pending.extend(module.children())


def holds_none(module: torch.nn.Module) -> bool:
    """Whether `module` can never have parameters to gather: PyTorch's own activations and the like.

    A module written by a user may reach for parameters of another one, and they count as its own
    from then on; a container is what recomputed parameters are attributed to.
    """
    own = type(module).__module__.startswith("torch.nn.modules.")
    return own and next(module.children(), None) is None and next(module.parameters(), None) is None


def is_leaf(module: torch.nn.Module) -> bool:
    """Whether ``set_z3_leaf_modules`` made it a unit: gathered and reduced as a whole."""
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


def leaf_inputs(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, int]:
    """Inputs whose gradient each z3 leaf module awaits before it reduces its parameters'.

    Releases up to 0.17.6 count them down from the forward on; later ones use a module hook.
    """
    awaited = ((module, vars(module).get(_LEAF_INPUTS)) for module in modules)
    return {module: count for module, count in awaited if count is not None}


def restore_leaf_inputs(awaited: dict[torch.nn.Module, int]) -> None:
    """Let a later backward await the same inputs as the first."""
    for module, count in awaited.items():
        setattr(module, _LEAF_INPUTS, count)


def releasable_parameters(offload: Any) -> Iterator[Any]:
    """Gathered parameters that nobody may keep.

    Not the persistent, the external, those of a running module, nor what was prefetched: a
    coalesced prefetch ends for all its parameters at once, so one may be gathered already while
    the registry still has it in flight.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    coordinator = offload.get_param_coordinator()
    in_flight = getattr(coordinator, _COORDINATOR + "inflight_param_registry")
    for param in offload.module.parameters():
        if (
            param.ds_status == ZeroParamStatus.AVAILABLE
            and not param.ds_persist
            and not param.is_external_param
            and not param.ds_active_sub_modules
            and param not in in_flight
        ):
            yield param


def holds_backward_fetch(coordinator: Any, module: torch.nn.Module) -> bool:
    """Whether a release of `module` is still owed: from 0.19.3 the epilogue may have done it."""
    active = vars(coordinator).get(_ACTIVE_FETCHES)
    return active is None or module.ds_id in active


def release_parameter(coordinator: Any, param: Any) -> None:
    """Partition `param` again, and take it off the coordinator's count of gathered elements."""
    getattr(coordinator, _COORDINATOR + "release_param")(param)


def rewind_prefetch(coordinator: Any) -> None:
    """Let the prefetcher see the rest of the trace again.

    It drops a use from its queue when the parameter is gathered at that moment. Between the
    backwards of one forward everything is released, so uses that it dropped would be fetched one
    by one. A complete trace holds them all; the queue restarts at the present step of it.
    """
    if not coordinator.is_complete_trace():
        return
    step_id = getattr(coordinator, _COORDINATOR + "step_id")
    order = getattr(coordinator, _COORDINATOR + "param_order")
    rest = deque(use for use in order if use.step_id_last_used_at >= step_id)
    setattr(coordinator, _COORDINATOR + "param_queue", rest)
    last_fetched: defaultdict[Any, int] = defaultdict(lambda: int(-1e10))
    setattr(coordinator, _COORDINATOR + "most_recent_step_id_param_fetched_for", last_fetched)
