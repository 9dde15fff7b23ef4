"""Stage 3: all-gathers and releases of parameters, module hooks, and the prefetch trace."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from ds_patches.core.calls import Around
from ds_patches.core.layer import Layer
from ds_patches.upstream import classes
from ds_patches.upstream.accelerator import accelerator, is_single_stream, wait_for_current
from ds_patches.upstream.classes import COORDINATOR

#: The autograd Functions at a module's outputs and at its inputs.
Functions = tuple[Any, Any]

_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")
_LEAF_INPUTS = "_leaf_module_inputs_remaining"
#: Names, and values, of attributes that the coordinator's class writes with two underscores.
private_name = partial(classes.private_name, COORDINATOR)
private = partial(classes.private, COORDINATOR)
#: Stands for a script's block among the modules that use a parameter.
_BLOCK = "GatheredParameters"


def gather_all(offload: Any) -> None:
    """All-gather the parameters that are still partitioned, in the model's order. Collective.

    The current stream waits for them. At most two prefetch buckets are in flight at a time.
    """
    coordinator = offload.get_param_coordinator()
    previous = list(in_flight(coordinator))  # prefetched
    bucket_size = int(private(coordinator, "prefetch_bucket_sz"))
    chunks = list(_chunks(offload.module.parameters(), bucket_size))
    if not previous and not chunks:
        return
    # The current stream may just have stepped, and written the partitions.
    wait_for_current(private(coordinator, "allgather_stream"))
    for chunk in chunks:
        private(coordinator, "all_gather_params")(chunk, forward=True)
        wait_for_gathers(coordinator, previous)
        previous = chunk
    wait_for_gathers(coordinator, previous)


def make_gathers_wait(optimizer: Any) -> None:
    """Make the all-gather stream wait for the current stream, on which the optimizer stepped."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    wait_for_current(private(coordinator, "allgather_stream"))


def block_releases(offload: Any, wrapper: Around) -> list[Layer]:
    """Stop all releases of parameters until the returned layers are removed.

    The prefetch trace is completed as a forward does, and kept: an unfinished one would be lost if
    an engine were built on the model meanwhile, since that gives the modules other ids. Collective
    if modules were recorded.

    wrapper: is called around the methods that partition all parameters, or register or remove
        hooks.
    """
    coordinator = offload.get_param_coordinator()
    if coordinator.is_record_trace() and private(coordinator, "submodule_order"):
        coordinator.reset_step()
    registering = ("_register_deepspeed_module", "_register_hooks_recursively")  # 0.16.4; before
    return [
        Layer(coordinator, private_name("release_param"), lambda *_: None),
        # This caches its results, which would depend on what is gathered now.
        Layer(coordinator, private_name("params_to_release"), lambda *_: set()),
        Layer(coordinator, "reset_step", lambda *_: None),
        Layer(coordinator, "release_and_reset_all", wrapper),
        Layer(offload, "_remove_module_hooks", wrapper),
        *(Layer(offload, name, wrapper) for name in registering if hasattr(offload, name)),
    ]


def hold_params(offload: Any, params: Iterable[Any]) -> None:
    """Keep modules from releasing parameters that a script gathered, until `release_hold`."""
    coordinator = offload.get_param_coordinator()
    if not getattr(coordinator, "fast_sharding_for_leaf_module", False):  # else releases ignore it
        for param in params:
            param.ds_active_sub_modules.add(_BLOCK)


def release_hold(params: Iterable[Any]) -> None:
    """Undo `hold_params`."""
    for param in params:
        param.ds_active_sub_modules.discard(_BLOCK)


def release_all(offload: Any) -> None:
    """Wait for all-gathers in flight, and partition the gathered parameters.

    Except persistent parameters, external ones, and those that a running module uses.
    """
    coordinator = offload.get_param_coordinator()
    if pending := list(in_flight(coordinator)):
        wait_for_gathers(coordinator, pending)
    for param in offload.module.parameters():
        if not param.ds_persist and not param.is_external_param:
            private(coordinator, "release_param")(param)


def reset_trace(offload: Any) -> None:
    """Begin a new prefetch trace after a forward or backward that raised.

    All parameters must be partitioned. An incomplete trace may end elsewhere on another rank.
    """
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_complete_trace() and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for module in offload.module.modules():
        # Counts of all-gathers and releases that the failed backward did not reach.
        for count in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
            if count in vars(module):
                setattr(module, count, 0)


def _chunks(params: Iterable[Any], numel: int) -> Iterator[list[Any]]:
    """Yield lists of partitioned parameters, of `numel` elements or one larger parameter."""
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


def module_functions(module: torch.nn.Module) -> Functions:
    """Return the Functions that DeepSpeed's forward hooks look up at each call; None if missing."""
    before, after = map(vars(module).get, _FUNCTIONS)
    return before, after


def set_module_functions(module: torch.nn.Module, functions: Functions) -> None:
    """Replace a module's pre- and post-backward functions."""
    for name, value in zip(_FUNCTIONS, functions, strict=True):
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)


def supports_transforms(functions: Functions) -> bool:
    """Return True if ``torch.func`` transforms accept these Functions: from 0.19.1 on."""
    nothing = torch.autograd.Function.setup_context
    return any(getattr(f, "setup_context", nothing) is not nothing for f in functions)


def release_module(offload: Any, module: torch.nn.Module) -> None:
    """Release a module after its backward, unless an epilogue (0.19.3) has released it."""
    active = vars(offload.get_param_coordinator()).get(private_name("active_backward_submodules"))
    if active is None or module.ds_id in active:
        offload.post_sub_module_backward_function(module)


def registered_modules(offload: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules with DeepSpeed's hooks: all but those inside a z3 leaf module."""
    pending = [offload.module]
    while pending:
        module = pending.pop()
        yield module
        if not is_leaf(module):
            pending.extend(module.children())


def never_has_params(module: torch.nn.Module) -> bool:
    """Return True if a module can never have parameters to gather, as PyTorch's activations.

    A user's module may use another module's parameters, and they count as its own from then on;
    DeepSpeed attributes recomputed parameters to a container.
    """
    is_torch = type(module).__module__.startswith("torch.nn.modules.")
    return is_torch and not any(True for _ in chain(module.children(), module.parameters()))


def any_frozen(module: torch.nn.Module) -> bool:
    """Return True if `module` gathers a frozen parameter."""
    external = (param for _, param in module.ds_external_parameters())  # type: ignore[operator]
    params = chain(module.parameters(recurse=is_leaf(module)), external)
    return not all(param.requires_grad for param in params)


def is_leaf(module: torch.nn.Module) -> bool:
    """Return True if ``set_z3_leaf_modules`` made it a unit: gathered and reduced as a whole.

    Ranks may use different parts of it.
    """
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


def leaf_inputs(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, int]:
    """Return the number of input gradients that each z3 leaf module awaits before it reduces.

    Releases up to 0.17.6 count them down from the forward on; later ones use a module hook.
    """
    awaited = ((module, vars(module).get(_LEAF_INPUTS)) for module in modules)
    return {module: count for module, count in awaited if count is not None}


def restore_leaf_inputs(awaited: dict[torch.nn.Module, int]) -> None:
    """Make a later backward await as many input gradients as the first."""
    for module, count in awaited.items():
        setattr(module, _LEAF_INPUTS, count)


def rewind_prefetch(offload: Any) -> None:
    """Put the rest of the trace back into the prefetch queue.

    The prefetcher removes a use from its queue when the parameter is gathered at that moment.
    Between the backwards of one forward all parameters are released, so the removed uses would be
    fetched one by one. A complete trace holds them all; the queue restarts at its current step.
    """
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_complete_trace():
        return
    step_id = private(coordinator, "step_id")
    order = private(coordinator, "param_order")
    remaining_uses = deque(use for use in order if use.step_id_last_used_at >= step_id)
    setattr(coordinator, private_name("param_queue"), remaining_uses)
    last_fetched: defaultdict[Any, int] = defaultdict(lambda: int(-1e10))
    setattr(coordinator, private_name("most_recent_step_id_param_fetched_for"), last_fetched)


# --- The coordinator ------------------------------------------------------------------------------


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Return the handles of all-gathers that were started and not awaited, by parameter."""
    handles: dict[Any, Any] = private(coordinator, "inflight_param_registry")
    return handles


def wait_for_gathers(coordinator: Any, params: Iterable[Any]) -> None:
    """Wait for all-gathers on their stream, and make the current stream wait for it."""
    pending, stream = in_flight(coordinator), private(coordinator, "allgather_stream")
    with accelerator().stream(stream):
        for param in params:
            pending.pop(param).wait()
    if not is_single_stream():
        accelerator().current_stream().wait_stream(stream)


@contextmanager
def keeping_trace_ids(coordinator: Any) -> Iterator[None]:
    """Update an unfinished trace to the modules' new ids, if they change meanwhile."""
    order = private(coordinator, "submodule_order")
    modules = {_module_id(module): module for module in order}
    try:
        yield
    finally:
        if coordinator.is_record_trace():
            steps = private(coordinator, "step_id_module_fetched_for")
            before = {module: steps.pop(module_id, ()) for module_id, module in modules.items()}
            for module, fetched in before.items():
                steps[_module_id(module)].extend(fetched)


def _module_id(module: Any) -> int:
    """Return the id of a module, an attribute that 0.16.4 renamed."""
    module_id: int = vars(module)["ds_id" if "ds_id" in vars(module) else "id"]
    return module_id
