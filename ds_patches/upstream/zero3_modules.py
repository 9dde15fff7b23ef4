"""Stage 3 parameters: who is registered, what is gathered, what the prefetcher queued."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from ds_patches.upstream.zero3_gathers import private, private_name

#: Of a module: the autograd Functions at its outputs and at its inputs.
Functions = tuple[Any, Any]

_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")
_MISSING = object()
_ACTIVE_FETCHES = private_name("active_backward_submodules")
_LEAF_INPUTS = "_leaf_module_inputs_remaining"


def functions_at(module: torch.nn.Module) -> Functions:
    """What upstream's forward hooks look up at every call of a module, and keep what they find."""
    before, after = (vars(module).get(name, _MISSING) for name in _FUNCTIONS)
    return before, after


def set_functions(module: torch.nn.Module, functions: Functions) -> None:
    """Put others there, or what `functions_at` gave."""
    for name, value in zip(_FUNCTIONS, functions, strict=True):
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)


def lets_transforms_pass(functions: Functions) -> bool:
    """Whether ``torch.func`` may pass what `functions_at` gave: from 0.19.1 on."""
    nothing = torch.autograd.Function.setup_context
    return any(getattr(one, "setup_context", nothing) is not nothing for one in functions)


def gather(offload: Any, module: torch.nn.Module) -> None:
    """Gather a module before its backward. A collective."""
    offload.pre_sub_module_backward_function(module)


def release(offload: Any, module: torch.nn.Module) -> None:
    """Release a module after its backward, unless an epilogue of 0.19.3 or later has done it."""
    active = vars(offload.get_param_coordinator()).get(_ACTIVE_FETCHES)
    if active is None or module.ds_id in active:
        offload.post_sub_module_backward_function(module)


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


def any_frozen(module: torch.nn.Module) -> bool:
    """Whether `module` gathers a parameter that does not train."""
    others = (param for _, param in module.ds_external_parameters())  # type: ignore[operator]
    params = chain(module.parameters(recurse=is_leaf(module)), others)
    return not all(param.requires_grad for param in params)


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


def rewind_prefetch(offload: Any) -> None:
    """Let the prefetcher see the rest of the trace again.

    It drops a use from its queue when the parameter is gathered at that moment. Between the
    backwards of one forward everything is released, so uses that it dropped would be fetched one
    by one. A complete trace holds them all; the queue restarts at the present step of it.
    """
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_complete_trace():
        return
    step_id = private(coordinator, "step_id")
    order = private(coordinator, "param_order")
    rest = deque(use for use in order if use.step_id_last_used_at >= step_id)
    setattr(coordinator, private_name("param_queue"), rest)
    last_fetched: defaultdict[Any, int] = defaultdict(lambda: int(-1e10))
    setattr(coordinator, private_name("most_recent_step_id_param_fetched_for"), last_fetched)
