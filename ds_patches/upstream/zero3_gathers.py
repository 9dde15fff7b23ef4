"""Stage 3: which parameters are gathered, the modules that gather them, the prefetch trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from ds_patches.core.calls import Around
from ds_patches.core.layer import Layer
from ds_patches.upstream import classes
from ds_patches.upstream.accelerator import accelerator, keeps_order, wait_for_current
from ds_patches.upstream.classes import COORDINATOR

#: Of a module: the autograd Functions at its outputs and at its inputs.
Functions = tuple[Any, Any]

_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")
_MISSING = object()
_LEAF_INPUTS = "_leaf_module_inputs_remaining"
#: Among the modules that use a parameter: a script's block.
_BLOCK = "GatheredParameters"


def gather(offload: Any) -> None:
    """All-gather the parameters that are still partitioned, in the order of the model. Collective.

    The current stream waits for them. At most two prefetch buckets are on their way at a time.
    """
    coordinator = offload.get_param_coordinator()
    previous = list(in_flight(coordinator))  # prefetched
    longest = int(private(coordinator, "prefetch_bucket_sz"))
    chunks = list(_chunks(offload.module.parameters(), longest))
    if not previous and not chunks:
        return
    # A step has just written the partitions.
    wait_for_current(private(coordinator, "allgather_stream"))
    for chunk in chunks:
        private(coordinator, "all_gather_params")(chunk, forward=True)
        arrive(coordinator, previous)
        previous = chunk
    arrive(coordinator, previous)


def gather_waits(optimizer: Any) -> None:
    """Make the stream that gathers wait for the current one, on which the optimizer has stepped."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    wait_for_current(private(coordinator, "allgather_stream"))


def hold(offload: Any, end: Around) -> list[Layer]:
    """Let nothing be released until the layers are removed.

    end: wraps what partitions everything, and what registers or removes the module hooks.
    """
    coordinator = offload.get_param_coordinator()
    registering = ("_register_deepspeed_module", "_register_hooks_recursively")  # from 0.16.4; to
    return [
        Layer(coordinator, private_name("release_param"), lambda *_: None),
        # It keeps its answers, and would answer by what is gathered now.
        Layer(coordinator, private_name("params_to_release"), lambda *_: set()),
        Layer(coordinator, "release_and_reset_all", end),
        Layer(offload, "_remove_module_hooks", end),
        *(Layer(offload, name, end) for name in registering if hasattr(offload, name)),
    ]


def hold_in_block(offload: Any, params: Iterable[Any]) -> None:
    """Let modules that run not release what a script has gathered, until `let_go`."""
    coordinator = offload.get_param_coordinator()
    if not getattr(coordinator, "fast_sharding_for_leaf_module", False):  # it asks nobody
        for param in params:
            param.ds_active_sub_modules.add(_BLOCK)


def let_go(params: Iterable[Any]) -> None:
    for param in params:
        param.ds_active_sub_modules.discard(_BLOCK)


def keep_trace(offload: Any) -> Layer:
    """Complete the prefetch trace as a forward does; until the layer is removed, keep it as it is.

    Collective if modules were recorded. Left unfinished, the trace would not survive an engine that
    is built on the model meanwhile: that gives the modules other numbers.
    """
    coordinator = offload.get_param_coordinator()
    if coordinator.is_record_trace() and private(coordinator, "submodule_order"):
        coordinator.reset_step()
    return Layer(coordinator, "reset_step", lambda *_: None)


def release(offload: Any) -> None:
    """Partition what is gathered, or on its way to be, and need not stay so.

    The persistent stay, the external, and, as the coordinator has it, those of a running module.
    """
    coordinator = offload.get_param_coordinator()
    if pending := list(in_flight(coordinator)):
        arrive(coordinator, pending)
    for param in offload.module.parameters():
        if not param.ds_persist and not param.is_external_param:
            private(coordinator, "release_param")(param)


def reset(offload: Any) -> None:
    """Begin a new trace, after a forward or backward that raised; all is partitioned already.

    A trace that was being recorded ends in the middle; on another rank it may end elsewhere.
    """
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_complete_trace() and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for module in offload.module.modules():
        # Gathers and releases that the backward still owed: the next forward counts from zero.
        for count in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
            if count in vars(module):
                setattr(module, count, 0)


def _chunks(params: Iterable[Any], numel: int) -> Iterator[list[Any]]:
    """Parameters that are partitioned, up to `numel` elements together, or one that is larger."""
    chunk: list[Any] = []
    size = 0
    for param in params:
        if param.ds_status.name != "NOT_AVAILABLE":
            continue
        if chunk and size + param.ds_numel > numel:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.ds_numel
    if chunk:
        yield chunk


# --- Modules --------------------------------------------------------------------------------------


def functions_at(module: torch.nn.Module) -> Functions:
    """What upstream's forward hooks look up at every call of a module, and keep what they find."""
    before, after = (vars(module).get(name, _MISSING) for name in _FUNCTIONS)
    return before, after


def set_functions(module: torch.nn.Module, functions: Functions) -> None:
    """Replace a module's pre- and post-backward functions."""
    for name, value in zip(_FUNCTIONS, functions, strict=True):
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)


def lets_transforms_pass(functions: Functions) -> bool:
    """Return True if ``torch.func`` may pass what `functions_at` gave: from 0.19.1 on."""
    nothing = torch.autograd.Function.setup_context
    return any(getattr(f, "setup_context", nothing) is not nothing for f in functions)


def release_module(offload: Any, module: torch.nn.Module) -> None:
    """Release a module after its backward, unless an epilogue of 0.19.3 or later has done it."""
    active = vars(offload.get_param_coordinator()).get(private_name("active_backward_submodules"))
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
    """Return True if a module can never have parameters to gather, as PyTorch's activations.

    A module written by a user may reach for parameters of another one, and they count as its own
    from then on; a container is what recomputed parameters are attributed to.
    """
    own = type(module).__module__.startswith("torch.nn.modules.")
    return own and next(module.children(), None) is None and next(module.parameters(), None) is None


def any_frozen(module: torch.nn.Module) -> bool:
    """Return True if `module` gathers a parameter that does not train."""
    others = (param for _, param in module.ds_external_parameters())  # type: ignore[operator]
    params = chain(module.parameters(recurse=is_leaf(module)), others)
    return not all(param.requires_grad for param in params)


def is_leaf(module: torch.nn.Module) -> bool:
    """Return True if ``set_z3_leaf_modules`` made it a unit: gathered and reduced as a whole."""
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


# --- What the coordinator keeps to itself ---------------------------------------------------------


def private_name(name: str) -> str:
    """Return what `name`, written with two underscores in the class, is called outside."""
    return classes.private_name(COORDINATOR, name)


def private(coordinator: Any, name: str) -> Any:
    """Return that attribute."""
    return getattr(coordinator, private_name(name))


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Return the handles of all-gathers that were started and not awaited, by parameter."""
    found: dict[Any, Any] = private(coordinator, "inflight_param_registry")
    return found


def arrive(coordinator: Any, params: Iterable[Any]) -> None:
    """Wait for all-gathers on their stream, and make the current stream wait for that."""
    pending, stream = in_flight(coordinator), private(coordinator, "allgather_stream")
    with accelerator().stream(stream):
        for param in params:
            pending.pop(param).wait()
    if not keeps_order():
        accelerator().current_stream().wait_stream(stream)


@contextmanager
def renumbered(coordinator: Any) -> Iterator[None]:
    """Modules get other numbers meanwhile, by which an unfinished trace has to know them then."""
    order = private(coordinator, "submodule_order")
    modules = {_number(module): module for module in order}
    try:
        yield
    finally:
        if coordinator.is_record_trace():
            steps = private(coordinator, "step_id_module_fetched_for")
            before = {module: steps.pop(number, ()) for number, module in modules.items()}
            for module, fetched in before.items():
                steps[_number(module)].extend(fetched)


def _number(module: Any) -> int:
    """Return the number of a module, which 0.16.4 renamed."""
    number: int = vars(module)["ds_id" if "ds_id" in vars(module) else "id"]
    return number
