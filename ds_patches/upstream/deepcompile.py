"""Engines that DeepCompile has taken over, and the fallback of 0.19.3 and later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_patches.upstream import zero3

_NATIVE = "_deepcompile_z3_eager_fallback"


def why_not_covered(engine: Any) -> str | None:
    """None if the patch covers `engine`; else the reason, empty where there is nothing to cover."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        return ""  # no optimizer: nothing is trained, and what is read is gathered by ZeRO
    if getattr(optimizer, "offload_optimizer", False):
        return "an offloaded optimizer needs ZeRO's own reduction, which DeepCompile removes"
    config = engine._config.zero_config
    if config.zero_quantized_weights or config.zero_quantized_gradients:
        return "quantized weights or gradients (ZeRO++) have a layout that it does not know"
    if config.zero_hpz_partition_size > 1 or getattr(config, "mics_shard_size", 0) > 0:
        return "secondary partitions (hpZ, MiCS) have a layout that it does not know"
    if getattr(optimizer, "sequence_parallel_size", 1) > 1:
        return "under sequence parallelism gradients are averaged over fewer ranks than reduce them"
    size = torch.distributed.get_world_size
    groups = map(zero3.group_of, zero3.below(engine.module))
    if any(size(group) != size(optimizer.dp_process_group) for group in groups):
        return "some parameters (AutoEP's experts) are averaged over more ranks than reduce them"
    if getattr(config.offload_param, "device", None) == "nvme":
        return "parameters on NVMe are swapped in by ZeRO's hooks, which DeepCompile removes"
    return None


def wants_deep_compile(engine: Any) -> bool:
    """Whether ``engine.compile()`` is going to make graphs of an engine that the patch covers."""
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    if enabled is None or not enabled() or engine.is_compiled:
        return False
    return engine.zero_optimization_partition_weights() and why_not_covered(engine) is None


def backend_of(compile: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The backend that ``engine.compile`` is called with, as a rule its name."""
    given = inspect.signature(compile).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments["backend"]


@contextmanager
def compiling(engine: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Around ``engine.compile()``: hand the module a changed backend, and give frozen parameters
    the empty gradient partitions that DeepCompile looks for, up to 0.19.2 or so in vain.
    """
    module = engine.module
    found = zero3.gradient_partitions(engine.optimizer)
    frozen = [p.ds_id for p in module.parameters() if p.ds_id not in found]
    found.update((ds_id, torch.Tensor()) for ds_id in frozen)
    module.compile = lambda **given: type(module).compile(
        module, **{**given, "backend": change(given["backend"])}
    )
    try:
        yield
    finally:
        del module.compile
        for ds_id in frozen:
            del found[ds_id]


def disown(engine: Any) -> Callable[[], object]:
    """Take DeepSpeed's own fallback away, so that there is one owner; return what undoes that."""
    if (native := getattr(engine, _NATIVE, None)) is None:
        return lambda: None
    native.release_gathered_params()
    setattr(engine, _NATIVE, None)
    return partial(setattr, engine, _NATIVE, native)


def keep_shapes_static(engine: Any) -> None:
    """Have Dynamo take the shapes of parameters for what they are, as it does by itself.

    From 0.19.4 DeepCompile lets them vary, since a parameter that its own fallback has gathered has
    another shape. Under this patch none has; and a frame that several layers share, with shapes
    that do differ, would be traced for any shape, which a partitioned parameter then fails.
    """
    put_back = getattr(engine, "_release_deepcompile_dynamo_config", None)
    if put_back is not None:
        put_back()


def drop_leaf_hooks(engine: Any) -> None:
    """Remove the hooks that reduce a leaf module's gradients.

    DeepCompile forgets them, and they then look for a bucket that it has taken away.
    """
    hooks = engine.optimizer._leaf_module_hooks
    for hook in hooks:
        hook.remove()
    hooks.clear()


def tells_layers_apart() -> bool:
    """Whether a frame compiled for one layer is not used for the next: 0.19.7 and later.

    Before, nothing in its guards says which parameter it gathers.
    """
    from deepspeed.compile import patch_fake_tensor

    return hasattr(patch_fake_tensor, "_zero3_parameter_guard_metadata")


def leaves(engine: Any) -> Sequence[Any]:
    """The ZeRO-3 leaf modules, of which ranks may use other parts."""
    from deepspeed.utils import get_z3_leaf_modules

    found: list[Any] = get_z3_leaf_modules(engine.module)
    return found
