"""Hooks, attributes and gathered parameters that a patch may leave behind on an engine.

    before = leftovers.of(engine)
    ...  # a window, a step, a failure
    assert not leftovers.since(before, engine)

What lives on an engine as long as a patch is applied has a name in `WHILE_APPLIED`. `run` asks of
each training that nothing of a patch is left after `unapply`.
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

#: Attributes that a patch sets when it meets an engine, and takes away when it is taken back.
OF_PATCHES = "accumulation accumulation_division coalesce dc_fallback stream_safety zero3_retain"
WHILE_APPLIED = frozenset(f"_ds_patches_{name}" for name in OF_PATCHES.split())
WHILE_APPLIED |= {
    "_ds_patches_zero12_gradients",
    "reduce_independent_p_g_buckets_and_remove_grads",  # zero12_gradients', around stock's
    *("pre_bwd_fn", "post_bwd_fn"),  # zero3_retain's, in place of stock's
    *("_parameters", "launch_compile_passes"),  # dc_fallback's, in place of ZeRO-3's
    *("allreduce_gradients", "backward_epilogue", "_get_offload_gradient_dict"),  # accumulation's
    *("copy_grads_in_partition", "reduce_ipg_grads", "independent_gradient_partition_epilogue"),
    *("_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",),
    *("_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket",),  # until the next gradient
    *("pre_sub_module_backward_function",),  # on devices with streams
}


def of(engine: Any) -> Counter[str]:
    """All that there is now, with its place."""
    return Counter(_all_of(engine))


def since(before: Counter[str], engine: Any, but: Container[str] = WHILE_APPLIED) -> dict[str, int]:
    """Return how many more there are than before, by name, and hooks that are gone.

    but: names of attributes that may be there.
    """
    now = of(engine)
    more = {what: now[what] - before[what] for what in now if now[what] > before[what]}
    gone = {what: -left for what, left in (before - now).items() if "hook" in what}
    return {
        what: count
        for what, count in {**more, **gone}.items()
        if not (_IS in what and what.partition(_IS)[0].rpartition(".")[2] in but)
    }


def of_patches(engine: Any) -> list[str]:
    """Return what is ours at an engine: nothing, once all patches are unapplied."""
    return [what for what in _all_of(engine) if _IS in what]


_IS = " is ours"


def _all_of(engine: Any) -> Iterator[str]:
    module = engine.module
    for owner, attributes in _owners(engine):
        yield from (
            f"{owner}.{name}{_IS}" for name, value in attributes.items() if _is_ours(name, value)
        )
    for name, submodule in module.named_modules():
        for registry, hooks in vars(submodule).items():
            if registry.endswith("_hooks") and isinstance(hooks, dict):
                ours = [hook for hook in hooks.values() if _is_ours("", hook)]
                yield from (f"module {name!r}.{hook.__name__}{_IS}" for hook in ours)
                yield from [f"module {name!r}: {registry}"] * (len(hooks) - len(ours))
    for name, param in module.named_parameters():
        yield from _of_parameter(name, param)
    # ZeRO-3 gathers these after each step; under DeepCompile none is marked as such.
    stay = {*map(id, getattr(engine.optimizer, "persistent_parameters", ()))}
    named = dict(module.named_parameters())
    whole = [name for name in gathered(engine, entitled=False) if id(named[name]) not in stay]
    yield from (f"parameter {name}: gathered" for name in whole)


def gathered(engine: Any, entitled: bool = True, held: Sequence[Any] = ()) -> list[str]:
    """Names of parameters that are whole, or on their way to be, and need not stay so.

    entitled: also those that upstream's prefetcher has in flight for the next backward.
    held: parameters that are to be whole.
    """
    held_ids = {*map(id, held)}
    in_flight = getattr(engine.module, "ds_inflight_param_registry", {})
    return [
        name
        for name, param in engine.module.named_parameters()
        if hasattr(param, "ds_id")
        and id(param) not in held_ids
        and not param.ds_persist
        and param.ds_status.name in ("AVAILABLE", "INFLIGHT")[: 1 + entitled]
        and (entitled or param not in in_flight)
    ]


def _of_parameter(name: str, param: Any) -> Iterator[str]:
    for registry in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from [f"parameter {name}: {registry}"] * len(getattr(param, registry) or ())
    for kind, count in _on_its_node(param).items():
        yield from [f"parameter {name}: {kind} hook of its AccumulateGrad"] * count
    if not hasattr(param, "ds_id"):
        return
    yield from [f"parameter {name}: in use"] * len(param.ds_active_sub_modules)


def _on_its_node(param: Any) -> dict[str, int]:
    """Hooks of Python on the node that adds up its gradient, if somebody keeps that node."""
    if not param.requires_grad:
        return {}
    with torch.enable_grad():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
    return {
        "post": _counted(node.register_hook(lambda *_: None)),
        "pre": _counted(node.register_prehook(lambda *_: None)),
    }


def _counted(handle: Any) -> int:
    """PyTorch keeps all hooks of a node in one dict, and tells it to the handle of each."""
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return len(hooks)


def _owners(engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects that a patch might set an attribute of."""
    optimizer = engine.optimizer
    yield "engine", vars(engine)
    yield "optimizer", vars(optimizer)
    if (offload := getattr(optimizer, "parameter_offload", None)) is not None:
        yield "offload", vars(offload)
        yield "coordinator", vars(offload.get_param_coordinator())
    for name, module in engine.module.named_modules():
        yield f"module {name!r}", vars(module)
    for name, param in engine.module.named_parameters():
        yield f"parameter {name}", vars(param)


def _is_ours(name: str, value: Any) -> bool:
    """By its name, or because what stands there is code of ours or an object of it."""
    if "ds_patches" in name:
        return True
    if isinstance(value, (torch.Tensor, nn.Module)):
        return False
    of_a_partial = getattr(value, "func", None)
    return any(
        str(getattr(kind, "__module__", "")).startswith("ds_patches")
        for kind in (value, type(value), of_a_partial)
    )
